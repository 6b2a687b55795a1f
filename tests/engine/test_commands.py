"""evaluate, predict and export on a trained run, through the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.__main__ import main
from tests.helpers.cases import small_model
from tests.helpers.project import EVALUATED


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "callbacks.py").write_text(EVALUATED)
    (tmp_path / "config.yaml").write_text("steps: 6\nbatch_size: 16\nckpt_every: 3\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--run-name", "first"]) == 0
    return tmp_path


def weights_at(project: Path, step: int, run: str = "first") -> list[np.ndarray]:
    model = small_model()
    ckpt = tf.train.Checkpoint(train_model=model)
    ckpt.read(str(project / f"runs/{run}/ckpt/ckpt-{step}")).expect_partial()
    return model.get_weights()  # type: ignore[no-any-return]


def test_a_run_is_resumed_with_the_flags_that_it_was_started_with(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--batch-size", "8", "--learning-rate", "0.02"]
    assert main(["train", "--run-name", "whole", "--steps", "9", *flags]) == 0
    assert main(["train", "--run-name", "parts", "--steps", "4", *flags]) == 0
    capsys.readouterr()
    assert main(["train", "--run-name", "parts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "config.yaml" in line] == [
        "runs/parts: has its own settings: steps 4 (config.yaml: 6), batch_size 8 (config.yaml: "
        "16); --config config.yaml takes those of the file."
    ]
    assert any("at step 4 of 4 already" in line for line in lines)
    assert main(["train", "--run-name", "parts", "--steps", "9"]) == 0
    for whole, parts in zip(
        weights_at(project, 9, "whole"), weights_at(project, 9, "parts"), strict=True
    ):
        np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize(
    "change",
    [
        "os.chdir('elsewhere')",
        "def leave():\n    os.chdir(home / 'elsewhere')\n\nevery_steps = {2: leave}",
    ],
)
def test_a_hook_that_changes_the_folder_leaves_the_run_where_it_is(
    project: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "elsewhere").mkdir()
    start = f"import os\nfrom pathlib import Path\n\nhome = Path({str(project)!r})\n"
    (project / "callbacks.py").write_text(start + EVALUATED + change)
    assert main(["train", "--run-name", "second"]) == 0
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
