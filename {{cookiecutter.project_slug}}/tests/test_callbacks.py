"""Smoke test: a few training steps on the CPU with the hooks in callbacks.py, then a resume."""

import math
import os
from pathlib import Path
from typing import Any

# Before TensorFlow is imported: the test is to run beside a training that fills the GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import pytest

import callbacks
import ctl_core

PROJECT = Path(__file__).resolve().parent.parent


def train(steps: int, runs_dir: Path) -> Any:
    """Trains or resumes the run "smoke"; what the engine finds wrong is shown as its one line."""
    try:
        config = ctl_core.load_config(
            PROJECT / "config.yaml",
            steps=steps,
            batch_size=8,
            limit_eval=2,
            run_name="smoke",
            runs_dir=str(runs_dir),
        )
        return ctl_core.train(callbacks, config)
    except ctl_core.CtlError as error:
        problem = str(error)
    pytest.fail(problem, pytrace=False)


def test_hooks_train_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks work, the numbers are finite, and a second start goes on where the first ended."""
    monkeypatch.chdir(PROJECT)
    state = train(2, tmp_path)
    assert int(state.step) == 2
    state = train(4, tmp_path)
    assert int(state.step) == 4
    assert all(math.isfinite(value) for value in state.metrics.values()), state.metrics
