"""A run that resumes from any step of two passes equals the uninterrupted run, bit for bit."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.golden import compare, engine, small

EXAMPLES, BATCH = 45, 8


def create_dataset(per_replica_batch_size: int, config: Any) -> tf.data.Dataset:
    """Returns five whole batches per pass, and five examples that ``last_batch`` keeps or drops."""
    inputs, target = (array[:EXAMPLES] for array in small.data())
    examples = tf.data.Dataset.from_tensor_slices((inputs, target)).shuffle(20, seed=3)
    scaled = examples.map(lambda x, y: (x * 1.1, y), num_parallel_calls=2)
    drop = config.last_batch == "drop"
    return scaled.batch(per_replica_batch_size, drop_remainder=drop).prefetch(2)


SETTINGS: dict[str, dict[str, Any]] = {
    "dropped": {"steps": 12, "virtual_devices": 1},
    "kept": {"steps": 14, "last_batch": "keep", "virtual_devices": 1},
    "kept on 3 devices": {"steps": 14, "last_batch": "keep", "virtual_devices": 3},
    "epochs": {"steps": None, "epochs": 2, "last_batch": "keep", "virtual_devices": 2},
}


@pytest.mark.parametrize("name", small.slow_but("kept", of=SETTINGS))
def test_resumed_after_every_step_of_two_passes(train_small: engine.Train, name: str) -> None:
    """Forks from the checkpoints of different steps end with the same weights.

    One setting is tested at every step. The passes of the others are read in the same way, so only
    the steps around the end of a pass are tested.
    """
    settings = {"batch_size": BATCH, "log_every": 1000, **SETTINGS[name]}
    hooks = small.hooks(create_dataset=create_dataset)
    whole = train_small(hooks, **settings, ckpt_every=1, run_name="whole").train_model.get_weights()
    length = 6 if "last_batch" in settings else 5
    every = range(1, 2 * length) if name == "kept on 3 devices" else range(length - 1, length + 2)
    for step in every:
        fork = {"run_name": f"from-{step}", "fork": f"whole@{step}"}
        resumed = train_small(hooks, **settings, **fork).train_model.get_weights()
        compare.assert_same(resumed, whole)


def test_the_order_is_another_in_each_pass(train_small: engine.Train) -> None:
    """Passes differ in their order. Otherwise, the test above could not detect a repeated pass."""
    seen: list[np.ndarray] = []
    hooks = small.hooks(
        create_dataset=create_dataset, every_steps={1: lambda batch: seen.append(batch[0].numpy())}
    )
    train_small(hooks, steps=10, batch_size=BATCH)
    passes = [np.concatenate(seen[start : start + 5]) for start in (0, 5)]
    assert not np.array_equal(passes[0], passes[1])
    assert len(np.unique(passes[0], axis=0)) == 40
