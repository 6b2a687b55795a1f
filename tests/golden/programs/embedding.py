"""An embedding: its gradient is sparse, and is clipped by the norm of all gradients."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, RATE, STEPS, Program

WORDS = np.random.default_rng(3).integers(0, 7, (44, 3)).astype("int32")
TARGET = WORDS.sum(axis=1, keepdims=True).astype("float32")
CLIP = 2.0

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((WORDS, TARGET)).batch(per_replica_batch_size)


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


def squared_error(loss_input: Any) -> Any:
    output, target = loss_input
    return tf.reduce_sum((output - target) ** 2, axis=1)


def update_pre(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, CLIP)[0], gradients


# ---- The same as a plain loop -----------------------------------------------------------------


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=lambda: squared_error,
        create_opt=lambda lr: keras.optimizers.SGD(lr),
        update_pre=update_pre,
        every_steps={},
    )


@functools.cache
def train_plainly() -> keras.Model:
    model, optimizer = create_model(), keras.optimizers.SGD(RATE)
    for words, target in create_dataset(BATCH).take(5).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(squared_error((model(words), target)))
        gradients = tape.gradient(loss, model.trainable_variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        # Dense: the norm of the gradient itself, whose rows may come in several parts.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        assert tf.linalg.global_norm(gradients) > CLIP, "the clip has to clip"
        clipped, _ = tf.clip_by_global_norm(gradients, CLIP)
        optimizer.apply_gradients(zip(clipped, model.trainable_variables, strict=True))
    return model


PROGRAM = Program(hooks, lambda: train_plainly().weights)
