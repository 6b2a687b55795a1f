"""Hooks that are trained with and without compiled stretches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.cases import clipped, make_hooks, set_weights, sgd

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 9, (44, 5)).astype("int32")
TARGET = RANDOM.normal(size=(44, 1)).astype("float32")


def words_model() -> keras.Model:
    output = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.01))
    body = [keras.layers.Embedding(9, 4), keras.layers.Flatten(), output]
    return set_weights(keras.Sequential([keras.Input((5,), dtype="int32"), *body]))


def words_hooks(**more: Any) -> SimpleNamespace:
    """Sparse gradients, with indices twice, clipped; the last batch of a pass is left out."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((WORDS, TARGET)).batch(per_replica_batch_size)

    own = {
        "create_dataset": create_dataset,
        "create_model": words_model,
        "update_pre": clipped,
        "create_opt": sgd,
    }
    return make_hooks(**{**own, **more})
