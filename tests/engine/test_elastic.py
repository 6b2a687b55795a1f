"""A cluster that comes back with another number of workers goes on where the last one was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.golden.compare import read_checkpoint
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import source_of

# Plain SGD: with Adam, gradients of another scale would give the same weights.
SGD = """
import keras


def create_opt(lr):
    return keras.optimizers.SGD(lr, momentum=0.9)
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_two_workers_then_three_then_one(tmp_path: Path) -> None:
    """Each takes up the data, the weights and the optimizer of the one before."""
    (tmp_path / "callbacks.py").write_text(source_of(create_opt=SGD))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CTL_")}
    environment = {**kept, "PYTHONPATH": PYTHONPATH}

    def train(run: str, steps: int, workers: int) -> str:
        command = [sys.executable, "-m", "ctl_core", "train", "--run-name", run]
        command += ["--steps", str(steps), "--workers", str(workers), "--batch-size", "12"]
        done = subprocess.run(
            [*command, "--learning-rate", "0.05"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    train("whole", 18, 1)
    assert "2 replicas" in train("parts", 6, 2)
    said = train("parts", 12, 3)
    assert "resuming at step 6" in said and "3 replicas" in said
    assert "resuming at step 12" in train("parts", 18, 1)
    whole, parts = (read_checkpoint(tmp_path / "runs" / name, 18) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and len(whole) > 3
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, 1e-5, 1e-6, err_msg=name)
