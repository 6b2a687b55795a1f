"""Training in a project's folder, and what the checkpoints of its runs hold."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf


def train_here(project: Path, *settings: str) -> None:
    """Trains in a process of its own, by no launcher."""
    command = [sys.executable, "-m", "ctl_core", "train", *settings]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=600)


def weights(run: Path, step: int) -> dict[str, np.ndarray]:
    """Returns what a checkpoint of create_ckpt has, by name."""
    reader = tf.train.load_checkpoint(str(run / "ckpt" / f"ckpt-{step}"))
    names = [n for n in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in n]
    return {n: reader.get_tensor(n) for n in names if not n.startswith("save_counter")}


def trained_to(run: Path, step: int, seconds: float = 600) -> None:
    """Waits for a checkpoint of at least this step."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        steps = [int(p.stem.split("-")[1]) for p in run.glob("ckpt/engine/ckpt-*.json")]
        if max(steps, default=0) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"{run} has no checkpoint of step {step}")


def assert_rounded_alike(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Compares two results of ``weights`` whose sums were taken in another order."""
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, 1e-5, 2e-6, err_msg=name)


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Compares two results of ``weights``, bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
