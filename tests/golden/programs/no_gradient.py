"""A layer that the loss does not depend on."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, Program, train_by_sgd

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(44, 5)).astype("float32")
TARGET = (INPUTS @ RANDOM.normal(size=(5, 1)) + 0.5).astype("float32")

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((INPUTS, TARGET)).batch(per_replica_batch_size)


class Unused(keras.Model):
    """Calls one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.used, self.unused = keras.layers.Dense(1), keras.layers.Dense(1)
        self.used.build((None, 5))
        self.unused.build((None, 5))

    def call(self, inputs: Any) -> Any:
        return self.used(inputs)


def squared_error(loss_input: Any) -> Any:
    output, target = loss_input
    return tf.reduce_sum((output - target) ** 2, axis=1)


# ---- The same as a plain loop -----------------------------------------------------------------


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=Unused,
        create_loss=lambda: squared_error,
        create_opt=lambda lr: keras.optimizers.SGD(lr),
        update_pre=lambda gradients: (gradients, gradients),
        every_steps={},
    )


@functools.cache
def train_plainly() -> keras.Model:
    model = Unused()
    variables = model.used.trainable_variables
    return train_by_sgd(model, create_dataset(BATCH).take(5), squared_error, variables)


PROGRAM = Program(hooks, lambda: train_plainly().weights, frozen=lambda: frozenset({2, 3}))
