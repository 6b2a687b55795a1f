"""Examples of different lengths: a step has the same ones, padded alike, on any devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.data import bucket_by_length
from tests.helpers.cases import assert_weights, make_hooks, sgd
from tests.helpers.fixtures import Train

EXAMPLES, BATCH, BOUNDARIES = 90, 8, [4, 7]


def words() -> tf.data.Dataset:
    """Sequences of 1 to 9 numbers, a target and a number each, shuffled."""

    def example(index: tf.Tensor) -> Any:
        length = 1 + (index * 7) % 9
        values = tf.random.stateless_normal([length, 1], [3, index])
        return values, tf.reduce_mean(values, 0) + 0.1, index

    return tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES, seed=1).map(example)


def length_of(values: tf.Tensor, *_: Any) -> tf.Tensor:
    return tf.shape(values)[0]


def bucketed(global_batch_size: int) -> tf.data.Dataset:
    return bucket_by_length(words(), length_of, BOUNDARIES, global_batch_size)


class Mean(keras.Model):
    """The mean over the padded length, too: what is padded otherwise trains otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.dense.build((None, None, 1))
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.tanh(self.dense(inputs)), 1)


def hooks(seen: list[Any], create_dataset: Any, **others: Any) -> SimpleNamespace:
    return make_hooks(
        **{
            "create_dataset": create_dataset,
            "create_model": Mean,
            "create_opt": sgd,
            "input_pre": lambda batch: batch[0],
            "loss_pre": lambda output, batch: (output, batch[1]),
            "every_steps": {1: lambda batch: seen.append(batch[2].numpy().tolist())},
            **others,
        }
    )


def by_hand(steps: int, rate: float) -> tuple[list[Any], list[np.ndarray]]:
    """A plain loop on one device; batches of a bucket's remainder are left out."""
    keras.utils.set_random_seed(0)
    whole = bucketed(BATCH).filter(lambda values, target, index: len(index) == BATCH).repeat()
    model, update, seen = Mean(), keras.optimizers.SGD(rate), []
    for values, target, index in whole.take(steps):
        with tf.GradientTape() as tape:
            error = tf.reduce_sum((model(values) - target) ** 2) / BATCH
        gradients = tape.gradient(error, model.trainable_variables)
        update.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        seen.append(index.numpy().tolist())
    return seen, model.get_weights()


@pytest.mark.parametrize(("replicas", "accumulate_steps"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_buckets_train_alike_on_any_devices(
    train: Train, capsys: pytest.CaptureFixture[str], replicas: int, accumulate_steps: int
) -> None:
    """Also across a resume; and what is left of the buckets is said."""
    expected, weights = by_hand(24, 0.5)
    seen: list[Any] = []
    for steps in (10, 24):
        state = train(
            hooks(seen, bucketed),
            steps=steps, batch_size=BATCH, learning_rate=0.5, virtual_devices=replicas,
            accumulate_steps=accumulate_steps,
        )  # fmt: skip
    assert [sorted(step) for step in seen] == [sorted(step) for step in expected]
    assert_weights(state, weights, rtol=1e-5)
    output = capsys.readouterr().out
    assert "different shapes" not in output and "reading and dropping" not in output


def test_epochs_of_buckets(train: Train) -> None:
    """Each bucket of 30 has three whole batches."""
    state = train(hooks([], bucketed), steps=None, epochs=2, batch_size=BATCH, virtual_devices=2)
    assert state.step == 18


def of_repeated(dataset: tf.data.Dataset, global_batch_size: int) -> tf.data.Dataset:
    return bucket_by_length(dataset, length_of, BOUNDARIES, global_batch_size)


def ragged(global_batch_size: int) -> tf.data.Dataset:
    return words().ragged_batch(global_batch_size)


@pytest.mark.parametrize(
    "own",
    [
        hooks([], words, make_batches=of_repeated),
        hooks([], ragged, input_pre=lambda batch: batch[0].to_tensor(shape=[None, 9, 1])),
    ],
    ids=["buckets of the repeated data", "ragged batches"],
)
def test_global_batches_that_are_cut_up_train_alike(
    train: Train, capsys: pytest.CaptureFixture[str], own: SimpleNamespace
) -> None:
    """Nothing is left out of the repeated data."""
    one, two = (
        train(own, steps=30, batch_size=BATCH, virtual_devices=n, run_name=f"on-{n}")
        for n in (1, 2)
    )
    assert_weights(two, one, rtol=1e-5)
    assert own.create_dataset is ragged or "leaves out" not in capsys.readouterr().out
