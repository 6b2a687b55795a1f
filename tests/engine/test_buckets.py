"""Buckets of the repeated data: nothing is left out, on any devices, also across a resume."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from ctl_core.data import bucket_by_length
from tests.helpers.cases import assert_weights, make_hooks, sgd
from tests.helpers.fixtures import Train


def words() -> tf.data.Dataset:
    """Sequences of 1 to 9 numbers and a target each, shuffled."""

    def example(index: tf.Tensor) -> Any:
        values = tf.random.stateless_normal([1 + (index * 7) % 9, 1], [3, index])
        return values, tf.reduce_mean(values, 0) + 0.1

    return tf.data.Dataset.range(90).shuffle(90, seed=1).map(example)


def make_batches(dataset: tf.data.Dataset, global_batch_size: int) -> tf.data.Dataset:
    return bucket_by_length(dataset, lambda x, _: tf.shape(x)[0], [4, 7], global_batch_size)


def test_buckets_of_the_repeated_data(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean is over the padded length, too: what is padded otherwise trains otherwise."""
    layer = lambda: keras.layers.Dense(1, "tanh", kernel_initializer="ones")  # noqa: E731
    hooks = make_hooks(
        create_dataset=words,
        make_batches=make_batches,
        create_model=lambda: keras.Sequential([keras.Input((None, 1)), layer()]),
        create_opt=sgd,
        loss_pre=lambda output, batch: (tf.reduce_mean(output, 1), batch[1]),
    )
    one = train(hooks, steps=30, batch_size=8, run_name="one")
    for steps in (10, 30):
        two = train(hooks, steps=steps, batch_size=8, virtual_devices=2, run_name="two")
    assert_weights(two, one, rtol=1e-5)
    assert "reading and dropping" not in capsys.readouterr().out
