"""Functions that train in a project's folder, find its processes and compare its checkpoints."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.golden.compare import read_checkpoint

FAILING = """

def fail(step):
    raise ValueError("a hook that fails")


at_step = {20: fail}
"""


def write_hooks(project: Path, name: str, more: str) -> None:
    """Writes a copy of the project's callbacks.py with more code at the end."""
    (project / name).write_text((project / "callbacks.py").read_text() + more)


def train_here(project: Path, *settings: str) -> None:
    """Trains in a separate process without a launcher."""
    command = [sys.executable, "-m", "ctl_core", "train", *settings]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=600)


def trained_to(run: Path, step: int, seconds: float = 600) -> None:
    """Waits until a run has a checkpoint of at least this step."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        steps = [int(p.stem.split("-")[1]) for p in run.glob("ckpt/engine/ckpt-*.json")]
        if max(steps, default=0) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"{run} has no checkpoint of step {step}")


def assert_rounded_alike(run: Path, other: Path, step: int) -> None:
    """Asserts that two checkpoints are equal up to rounding, which depends on the order of sums."""
    saved = read_checkpoint(run, step)
    for name, value in read_checkpoint(other, step).items():
        np.testing.assert_allclose(saved[name], value, 1e-5, 2e-6, err_msg=name)


def find_training(*marks: str) -> int:
    """Returns the PID of a training process.

    Args:
        marks: words of its command line, and ``NAME=value`` of its environment
    """
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, environ = (
                (folder / name).read_bytes().decode(errors="replace").split("\0")
                for name in ("cmdline", "environ")
            )
        except OSError:  # the process has ended
            continue
        if "ctl_core" in words and {*marks} <= {*words, *environ}:
            return int(folder.name)
    raise AssertionError(f"no training of {marks}")
