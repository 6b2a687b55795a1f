"""Two inputs and two outputs, in dicts, for which the loss of each example is a sum of two."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, Program, train_by_sgd

RANDOM = np.random.default_rng(0)
INPUTS = {name: RANDOM.normal(size=(44, 5)).astype("float32") for name in ("left", "right")}
SUM = INPUTS["left"].sum(axis=1, keepdims=True) + 0.5
TARGET = {"sum": SUM, "product": np.concatenate([SUM, INPUTS["right"][:, :1]], axis=1)}

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((INPUTS, TARGET)).batch(per_replica_batch_size)


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
    both = keras.layers.Concatenate()([left, right])
    hidden = keras.layers.Dense(6, activation="tanh")(both)
    outputs = {"sum": keras.layers.Dense(1)(hidden), "product": keras.layers.Dense(2)(hidden)}
    return keras.Model({"left": left, "right": right}, outputs)


def squared_error(loss_input: Any) -> Any:
    output, target = loss_input
    return tf.reduce_sum((output["sum"] - target["sum"]) ** 2, axis=1) + 0.5 * tf.reduce_sum(
        (output["product"] - target["product"]) ** 2, axis=1
    )


# ---- The same as a plain loop -----------------------------------------------------------------


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=lambda: squared_error,
        create_opt=lambda lr: keras.optimizers.SGD(lr),
        update_pre=lambda gradients: (gradients, gradients),
        every_steps={},
    )


@functools.cache
def train_plainly() -> keras.Model:
    return train_by_sgd(create_model(), create_dataset(BATCH).take(5), squared_error)


PROGRAM = Program(hooks, lambda: train_plainly().weights)
