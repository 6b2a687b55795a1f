"""Text classification with a transformer, after Keras' example: attention, trained by Adam.

The key bias of attention adds the same to all scores of a query, which the softmax takes off again:
its true gradient is zero. It is left out of the comparison, by its gradient.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, STEPS, Program, find_rounding

WORDS, LENGTH, SIZE, RATE = 9, 6, 4, 0.02
RANDOM = np.random.default_rng(0)
TEXTS = RANDOM.integers(0, WORDS, size=(40, LENGTH)).astype("int32")
LABELS = (TEXTS.sum(axis=1) % 3).astype("int32")

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(per_replica_batch_size)


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    text = keras.Input((LENGTH,), dtype="int32")
    words = keras.layers.Embedding(WORDS, SIZE, keras.initializers.RandomNormal(stddev=0.7))(text)
    places = keras.layers.Embedding(LENGTH, SIZE)(tf.range(LENGTH)[None])
    hidden = words + places
    attended = keras.layers.MultiHeadAttention(2, 3)(hidden, hidden)
    hidden = keras.layers.LayerNormalization()(hidden + attended)
    hidden = keras.layers.Dense(8, activation="tanh")(hidden)
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(text, keras.layers.Dense(3)(pooled))


def crossentropy(loss_input: Any) -> Any:
    output, label = loss_input
    return keras.losses.sparse_categorical_crossentropy(label, output, from_logits=True)


def create_loss() -> Any:
    return crossentropy


def create_opt(lr: Any) -> keras.Optimizer:
    return keras.optimizers.Adam(lr)


# ---- The same as a plain loop -----------------------------------------------------------------


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=create_loss,
        create_opt=create_opt,
        every_steps={},
    )


@functools.cache
def train_plainly() -> tuple[keras.Model, frozenset[int]]:
    """Returns the model, and which of its weights have no gradient but rounding."""
    model, optimizer, seen = create_model(), keras.optimizers.Adam(RATE), []
    for texts, labels in create_dataset(BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(crossentropy((model(texts, training=True), labels)))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]  # sums up rows
        seen.append(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model, find_rounding(seen)


def find_key_bias() -> frozenset[int]:
    model, positions = train_plainly()
    (position,) = positions
    assert model.trainable_variables[position].path.endswith("key/bias")
    return positions


PROGRAM = Program(
    hooks,
    lambda: train_plainly()[0].trainable_variables,
    weights=lambda state: state.train_model.trainable_variables,
    settings={"learning_rate": RATE},
    ignored=find_key_bias,
)
