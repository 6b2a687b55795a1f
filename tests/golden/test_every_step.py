"""A run that ends after any step of two passes and goes on is the whole run, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.golden import engine, small

EXAMPLES, BATCH = 45, 8


def create_dataset(per_replica_batch_size: int, config: Any) -> tf.data.Dataset:
    """Five whole batches a pass, and five examples that ``last_batch`` keeps or leaves out."""
    inputs, target = (part[:EXAMPLES] for part in small.data())
    examples = tf.data.Dataset.from_tensor_slices((inputs, target)).shuffle(20, seed=3)
    scaled = examples.map(lambda x, y: (x * 1.1, y), num_parallel_calls=2)
    drop = config.last_batch == "drop"
    return scaled.batch(per_replica_batch_size, drop_remainder=drop).prefetch(2)


def read_hooks() -> SimpleNamespace:
    return small.hooks(create_dataset=create_dataset)


@pytest.mark.parametrize(
    ("last_batch", "devices", "length"),
    [
        ({"steps": 12}, 1, 5),
        ({"steps": 14, "last_batch": "keep"}, 1, 6),
        pytest.param(
            {"steps": None, "epochs": 2, "last_batch": "keep"}, 1, 6, marks=pytest.mark.slow
        ),
        pytest.param({"steps": 14, "last_batch": "keep"}, 2, 6, marks=pytest.mark.slow),
        ({"steps": 12}, 3, 5),
        ({"steps": 14, "last_batch": "keep"}, 3, 6),
    ],
    ids=[
        "dropped",
        "kept",
        "epochs",
        "kept on two devices",
        "dropped on three devices",
        "kept on three devices",
    ],
)
def test_resumed_after_every_step_of_two_passes(
    train: engine.Train, last_batch: dict[str, Any], devices: int, length: int
) -> None:
    settings = {"batch_size": BATCH, "learning_rate": 0.05, "virtual_devices": devices}
    settings |= {"log_every": 1000, "max_restarts": 0, **last_batch}
    whole = train(read_hooks(), **settings, run_name="whole")
    for step in range(1, 2 * length):
        first = settings | {"steps": step, "epochs": None, "run_name": f"parts-{step}"}
        train(read_hooks(), **first)
        resumed = train(read_hooks(), **settings, run_name=f"parts-{step}")
        assert resumed.step == whole.step
        for value, other in zip(
            resumed.train_model.weights, whole.train_model.weights, strict=True
        ):
            np.testing.assert_array_equal(value.numpy(), other.numpy(), err_msg=f"after {step}")


def test_the_order_is_another_in_each_pass(train: engine.Train) -> None:
    """Or the test above would hold of a run that begins each pass alike."""
    seen: list[np.ndarray] = []
    hooks = read_hooks()
    hooks.every_steps = {1: lambda batch: seen.append(batch[0].numpy())}
    train(hooks, steps=10, batch_size=BATCH)
    passes = [np.concatenate(seen[start : start + 5]) for start in (0, 5)]
    assert not np.array_equal(passes[0], passes[1])
    assert len(np.unique(passes[0], axis=0)) == 40
