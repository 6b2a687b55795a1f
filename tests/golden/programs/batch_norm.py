"""Batch normalisation over the batch of all replicas, and its moving statistics."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, Program, train_by_sgd

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(1.0, 2.0, size=(44, 5)).astype("float32")
TARGET = (INPUTS @ RANDOM.normal(size=(5, 1))).astype("float32")

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((INPUTS, TARGET)).batch(per_replica_batch_size)


def create_model(synchronized: bool = True) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9, synchronized=synchronized),
            keras.layers.Dense(1),
        ]
    )


def squared_error(loss_input: Any) -> Any:
    output, target = loss_input
    return tf.reduce_sum((output - target) ** 2, axis=1)


# ---- The same as a plain loop -----------------------------------------------------------------


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_eval_dataset=create_dataset,
        create_model=create_model,
        create_loss=lambda: squared_error,
        create_opt=lambda lr: keras.optimizers.SGD(lr),
        update_pre=lambda gradients: (gradients, gradients),
        every_steps={},
    )


@functools.cache
def train_plainly() -> keras.Model:
    return train_by_sgd(
        create_model(synchronized=False), create_dataset(BATCH).take(5), squared_error
    )


def evaluate_plainly() -> dict[str, float]:
    return {"loss": float(tf.reduce_mean(squared_error((train_plainly()(INPUTS), TARGET))))}


# Statistics of micro-batches are others.
PROGRAM = Program(
    hooks, lambda: train_plainly().weights, metrics=evaluate_plainly, accumulates=False
)
