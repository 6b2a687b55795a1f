"""Weights that are regularised, by Keras' default optimizer for hooks, with clipped gradients."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, RATE, STEPS, Program

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(44, 5)).astype("float32")
TARGET = (INPUTS @ RANDOM.normal(size=(5, 1)) + 0.5).astype("float32")
CLIP = 0.05

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((INPUTS, TARGET)).batch(per_replica_batch_size)


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    regular = keras.regularizers.L2(0.01)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer=regular),
            keras.layers.Dense(1, kernel_regularizer=regular),
        ]
    )


def squared_error(loss_input: Any) -> Any:
    output, target = loss_input
    return tf.reduce_sum((output - target) ** 2, axis=1)


def create_opt(lr: Any) -> keras.Optimizer:
    return keras.optimizers.Nadam(learning_rate=lr, epsilon=0.001)


def update_pre(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, CLIP)[0], gradients


# ---- The same as a plain loop -----------------------------------------------------------------


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_eval_dataset=create_dataset,
        create_model=create_model,
        create_loss=lambda: squared_error,
        create_opt=create_opt,
        update_pre=update_pre,
        every_steps={},
    )


@functools.cache
def train_plainly() -> keras.Model:
    model, optimizer = create_model(), create_opt(RATE)
    for inputs, target in create_dataset(BATCH).take(5).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(squared_error((model(inputs), target)))
            loss = error + tf.add_n(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        assert tf.linalg.global_norm(gradients) > CLIP, "the clip has to clip"
        optimizer.apply_gradients(
            zip(update_pre(gradients)[0], model.trainable_variables, strict=True)
        )
    return model


def evaluate_plainly() -> dict[str, float]:
    model = train_plainly()
    error = tf.reduce_mean(squared_error((model(INPUTS), TARGET)))
    return {"loss": float(error + tf.add_n(model.losses))}


PROGRAM = Program(hooks, lambda: train_plainly().weights, metrics=evaluate_plainly)
