"""evaluate, predict and export on a trained run, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

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
