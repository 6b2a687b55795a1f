"""evaluate, predict and export on a trained run, through the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ctl_core
from ctl_core.__main__ import main
from tests.helpers.project import EVALUATED


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_hook_that_changes_the_folder_leaves_the_run_where_it_is(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "elsewhere").mkdir()
    start = f"import os\nfrom pathlib import Path\n\nhome = Path({str(project)!r})\n"
    leave = "def leave():\n    os.chdir(home / 'elsewhere')\n\nevery_steps = {2: leave}"
    (project / "callbacks.py").write_text(start + EVALUATED + leave)
    assert main(["train", "--run-name", "second", "--steps", "6", "--batch-size", "16"]) == 0
    monkeypatch.chdir(project)
    assert main(["predict", "--run-name", "second", "--output", "here.npz"]) == 0
    assert not list((project / "elsewhere").iterdir()) and (project / "here.npz").exists()
    assert (project / "runs/second/ckpt/ckpt-6.index").exists()
    assert (project / "runs/second/tb").exists()


def test_a_package_that_is_not_installed_is_one_line(project: Path) -> None:
    command = [sys.executable, "-S", "-m", "ctl_core", "train"]  # -S: no installed packages
    environ = {**os.environ, "PYTHONPATH": str(Path(ctl_core.__file__).parents[1])}
    environ.pop("VIRTUAL_ENV", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: \w+ is not installed in \S+; in the project's folder: \S+ -m pip install "
        r"--editable \.\n",
        done.stderr,
    )
