"""A project of one file of hooks, trained by commands, and the same training as a plain loop."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.helpers.cases import regression_data, small_model, squared_error

BASE = """
import keras
import tensorflow as tf
from tests.helpers.cases import regression_data, sliced, small_model, squared_error

create_model = small_model
create_dataset = sliced(regression_data())
create_eval_dataset = create_dataset
every_steps = {}


def create_loss():
    return squared_error


def create_opt(lr):
    return keras.optimizers.SGD(lr)
"""
FLAGS = ("--steps", "4", "--batch-size", "16", "--learning-rate", "0.1")


def weights(run: str, step: int = 4) -> list[np.ndarray]:
    model = small_model()
    ckpt = tf.train.Checkpoint(train_model=model)
    ckpt.read(f"runs/{run}/ckpt/ckpt-{step}").expect_partial()
    return model.get_weights()  # type: ignore[no-any-return]


def by_hand(factor: float, steps: int = 4) -> list[np.ndarray]:
    """The weights of the same training as a plain loop."""
    model = small_model()
    inputs, target = regression_data()
    for step in range(steps):
        rows = slice(step * 16, step * 16 + 16)
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_mean(squared_error((model(inputs[rows]), target[rows])))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 10.0)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
    return model.get_weights()  # type: ignore[no-any-return]
