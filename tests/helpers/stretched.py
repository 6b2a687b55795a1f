"""Hooks that are trained with and without compiled stretches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.cases import make_hooks, set_weights, sliced

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(44, 6, 6, 1)).astype("float32")
WORDS = RANDOM.integers(0, 9, (44, 5)).astype("int32")
TARGET = RANDOM.normal(size=(44, 1)).astype("float32")


def words_model() -> keras.Model:
    regular = keras.regularizers.L2(0.01)
    body = [keras.layers.Embedding(9, 4), keras.layers.Flatten()]
    return set_weights(
        keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                *body,
                keras.layers.Dense(1, kernel_regularizer=regular),
            ]
        )
    )


def image_model() -> keras.Model:
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(8, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )


def squares() -> Any:
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2, 1)


def words_hooks(**more: Any) -> SimpleNamespace:
    """Sparse gradients, with indices twice, clipped; the last batch of a pass is left out."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((WORDS, TARGET)).batch(per_replica_batch_size)

    def update_pre(gradients: Any) -> Any:
        return tf.clip_by_global_norm(gradients, 0.1)[0], gradients

    own = {
        "create_dataset": create_dataset,
        "create_model": words_model,
        "create_loss": squares,
        "update_pre": update_pre,
        "create_opt": lambda lr: keras.optimizers.SGD(lr),
        "every_steps": {},
    }
    return make_hooks(**{**own, **more})


def image_hooks(**more: Any) -> SimpleNamespace:
    own = {
        "create_dataset": sliced((IMAGES, TARGET)),
        "create_model": image_model,
        "create_loss": squares,
        "create_opt": lambda lr: keras.optimizers.Nadam(lr, epsilon=1e-3),
        "every_steps": {},
    }
    return make_hooks(**{**own, **more})
