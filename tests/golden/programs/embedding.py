"""An embedding: its gradient is sparse, and is clipped by the norm of all gradients."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program

WORDS = np.random.default_rng(3).integers(0, 7, (44, 3)).astype("int32")
TARGET = WORDS.sum(axis=1, keepdims=True).astype("float32")
CLIP = 2.0
create_dataset = small.slices((WORDS, TARGET))


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


def update_pre(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, CLIP)[0], gradients


hooks = functools.partial(
    small.hooks, create_dataset=create_dataset, create_model=create_model, update_pre=update_pre
)


PROGRAM = Program(hooks)
