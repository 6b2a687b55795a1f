"""Standard error of every command, all of it: nothing where all is well, the reason where not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import small
from tests.helpers.lean import PYTHONPATH

EVALUATED = "from tests.golden.small import create_eval_dataset\n"
LISTENER = """
import ctl_core


class Notes(ctl_core.Listener):
    def start(self, folder, config, step):
        self.file = (folder / "notes").open("a")
        print("start", step, file=self.file)

    def end(self, step, how):
        print(how, step, file=self.file, flush=True)
"""


def ctl(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process without the settings of the tests for TensorFlow's log."""
    names = ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-W", "default::DeprecationWarning:__main__", "-m", "ctl_core"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": PYTHONPATH, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.cluster
def test_a_command_that_goes_well_says_nothing_there(tmp_path: Path) -> None:
    """The second training finds the list of checkpoints gone; a cluster's chief is heard."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + EVALUATED)
    (tmp_path / "own.py").write_text(LISTENER)
    train = ("train", "--batch-size=16", "--run-name=a")
    for arguments in (
        (*train, "--steps=2", "--virtual-devices=2"),
        (*train, "--steps=4", "--virtual-devices=1", "--workers=2", "--listener=own.Notes"),
        ("evaluate",),
        ("predict",),
        ("export",),
    ):
        done = ctl(tmp_path, *arguments)
        assert (done.returncode, done.stderr) == (0, ""), arguments
        (tmp_path / "runs/a/ckpt/checkpoint").unlink(missing_ok=True)
    assert (tmp_path / "runs/a/notes").read_text() == "start 2\ndone 4\n"
    assert "oneDNN" in ctl(tmp_path, "evaluate", "--debug", TF_ENABLE_ONEDNN_OPTS="1").stderr
