"""Pipelines whose saved position would not be exact are read again instead."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests.helpers.cases import assert_weights, make_hooks, regression_data
from tests.helpers.fixtures import Train


def examples() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(regression_data())


# A pass of 12 batches of 8: what is read ahead of its last ones has left the shuffle behind.
AHEAD: dict[str, Any] = {
    "prefetch": lambda data: data.batch(8, drop_remainder=True).prefetch(4),
    "a map that runs ahead": lambda data: data.batch(8, drop_remainder=True).map(
        lambda x, y: (x, y), num_parallel_calls=4
    ),
    "a cache": lambda data: data.cache().batch(8, drop_remainder=True).prefetch(4),
    "batches cut up": lambda data: data.batch(30).unbatch().batch(8, drop_remainder=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AHEAD)
def test_stages_that_read_ahead_of_the_end_of_a_pass(train: Train, name: str) -> None:
    """Wherever the run is stopped in two passes, it goes on with the right examples."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return AHEAD[name](examples().shuffle(60, seed=1))

    hooks = make_hooks(create_dataset=create_dataset)
    whole = train(hooks, steps=26, run_name="whole", batch_size=8)
    for steps in (7, 9, 10, 11, 12, 22, 23, 26):
        parts = train(hooks, steps=steps, run_name="parts", batch_size=8)
    assert_weights(parts, whole, rtol=0)


@pytest.mark.parametrize("cut", [3, 6, 8])
def test_two_shuffles_resume_exactly_by_reading_again(
    train: Train, capsys: pytest.CaptureFixture[str], cut: int
) -> None:
    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        data = examples().shuffle(50, seed=1).shuffle(100, seed=2)
        return data.batch(per_replica_batch_size, drop_remainder=True)

    hooks = make_hooks(create_dataset=create_dataset)
    whole = train(hooks, steps=20, run_name="whole")
    train(hooks, steps=cut, run_name="parts")
    parts = train(hooks, steps=20, run_name="parts")
    output = capsys.readouterr().out
    assert "cannot be saved exactly" in output and f"dropping {16 * cut} examples" in output
    assert_weights(whole, parts, rtol=0)
