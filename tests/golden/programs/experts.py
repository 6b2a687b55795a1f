"""A mixture of experts, after Keras' Switch Transformer: its loss is of the batch as a whole.

How evenly experts are used is a product of two means over the batch, which ``add_loss`` adds in a
layer of a functional model. The layer takes the means over all replicas.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import ctl_core
from tests.golden.compare import BATCH, RATE, STEPS, Program

WORDS, LENGTH, SIZE, EXPERTS = 20, 6, 4, 3
RANDOM = np.random.default_rng(0)
TEXTS = RANDOM.integers(0, WORDS, (40, LENGTH))
LABELS = RANDOM.integers(0, 2, 40)

# ---- callbacks.py -----------------------------------------------------------------------------


class Switch(keras.layers.Layer):
    """Sends each word to the expert that the router finds best."""

    def __init__(self, exchanged: bool) -> None:
        super().__init__()
        self.mean = mean_of_all if exchanged else mean_of_own
        self.router = keras.layers.Dense(EXPERTS)
        self.experts = [keras.layers.Dense(SIZE, "tanh") for _ in range(EXPERTS)]

    def build(self, shape: Any) -> None:
        for layer in (self.router, *self.experts):
            layer.build((None, SIZE))

    def call(self, inputs: Any) -> Any:
        words = ops.reshape(inputs, [-1, SIZE])
        shares = ops.softmax(self.router(words))
        chosen = ops.one_hot(ops.argmax(shares, axis=-1), EXPERTS)
        self.add_loss(EXPERTS * ops.sum(self.mean(chosen) * self.mean(shares)))
        gates = ops.split(chosen * shares, EXPERTS, axis=-1)
        pairs = zip(gates, self.experts, strict=True)
        return ops.reshape(sum(gate * expert(words) for gate, expert in pairs), ops.shape(inputs))


def mean_of_own(values: Any) -> Any:
    return ops.mean(values, axis=0)


def mean_of_all(values: Any) -> Any:
    return ctl_core.all_reduce(mean_of_own(values), "mean")


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(per_replica_batch_size)


def create_model(exchanged: bool = True) -> keras.Model:
    keras.utils.set_random_seed(1)
    words = keras.Input((LENGTH,))
    x = keras.layers.Embedding(WORDS, SIZE, "normal")(words)
    x = keras.layers.GlobalAveragePooling1D()(x + Switch(exchanged)(x))
    model = keras.Model(words, keras.layers.Dense(2)(x))
    model(TEXTS[:1])  # as people do, to see that it works
    return model


def create_loss() -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda loss_input: loss(loss_input[1], loss_input[0])


def hooks(exchanged: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_eval_dataset=create_dataset,
        create_model=lambda: create_model(exchanged),
        create_loss=create_loss,
        create_opt=lambda lr: keras.optimizers.SGD(lr),
        update_pre=lambda gradients: (gradients, gradients),
        every_steps={},
    )


# ---- The same as a plain loop -----------------------------------------------------------------


@functools.cache
def train_plainly() -> keras.Model:
    model, optimizer = create_model(exchanged=False), keras.optimizers.SGD(RATE)
    mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for texts, labels in create_dataset(BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = mean(labels, model(texts, training=True)) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    return model


def evaluate_plainly() -> dict[str, float]:
    """Of batches as large as those of the evaluation, as what a layer adds is of them."""
    model, losses = train_plainly(), []
    for texts, labels in create_dataset(BATCH):
        error = create_loss()((model(texts), labels))
        losses.append(tf.reduce_mean(error) + sum(model.losses))
    return {"loss": float(np.mean(losses))}


# Of micro-batches the experts' shares would be others.
PROGRAM = Program(
    hooks, lambda: train_plainly().weights, metrics=evaluate_plainly, accumulates=False
)
