"""Batch normalisation over the batch of all replicas, and its moving statistics."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tests.golden import compare, small
from tests.golden.compare import Program, whole_batches

INPUTS, TARGET = small.data(44)
create_dataset = small.slices((2.0 * INPUTS + 1.0, TARGET))


def create_model(synchronized: bool = True) -> keras.Model:
    return small.model_with(
        keras.layers.BatchNormalization(momentum=0.9, synchronized=synchronized)
    )


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_eval_dataset=create_dataset,
    create_model=create_model,
)


@functools.cache
def train_plainly() -> keras.Model:
    model = create_model(synchronized=False)

    def mean_loss(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        return tf.reduce_mean(small.squared_error((model(batch[0], training=True), batch[1])))

    return compare.train_plainly(model, whole_batches(create_dataset), mean_loss)


def evaluate_plainly() -> dict[str, float]:
    error = small.squared_error((train_plainly()(2.0 * INPUTS + 1.0), TARGET))
    return {"loss": float(tf.reduce_mean(error))}


# Statistics of micro-batches are others.
PROGRAM = Program(hooks, train_plainly, metrics=evaluate_plainly, accumulates=False)
