"""What the checkpoints in the folder of a run hold, and waiting for one; without our engine."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import tensorflow as tf


def weights(run: Path, step: int) -> dict[str, np.ndarray]:
    """Returns what a checkpoint of create_ckpt has, by name."""
    reader = tf.train.load_checkpoint(str(run / "ckpt" / f"ckpt-{step}"))
    names = [n for n in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in n]
    return {n: reader.get_tensor(n) for n in names if not n.startswith("save_counter")}


def trained_to(run: Path, step: int, seconds: float = 200) -> None:
    """Waits for a checkpoint of at least this step."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        steps = [int(p.stem.split("-")[1]) for p in run.glob("ckpt/engine/ckpt-*.json")]
        if max(steps, default=0) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"{run} has no checkpoint of step {step}")


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Compares two results of ``weights``, bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
