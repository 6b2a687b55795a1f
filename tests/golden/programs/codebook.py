"""A VQ-VAE whose codebook is a moving average, after Keras' example and van den Oord et al. 2017.

The codebook is no trained variable: the layer assigns to it in ``call``, what all replicas have
found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, RATE, STEPS, Program

FEATURES, CODES, SIZE = 6, 5, 3
DECAY, BETA, EPSILON = 0.8, 0.25, 1e-5
INPUTS = np.random.default_rng(0).normal(size=(44, FEATURES)).astype("float32")

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(INPUTS).batch(per_replica_batch_size)


def over_replicas(value: Any) -> Any:
    if replica := tf.distribute.get_replica_context():
        value = replica.all_reduce(tf.distribute.ReduceOp.SUM, value)
    return value


class Codebook(keras.layers.Layer):
    """Replaces each vector by the nearest code; codes are moving averages of what they replace."""

    def __init__(self, exchange: Callable[[Any], Any]) -> None:
        super().__init__(name="codebook")
        self.exchange = exchange

    def build(self, shape: Any) -> None:
        def weight(shape: tuple[int, ...], name: str, start: Any) -> Any:
            return self.add_weight(shape=shape, name=name, initializer=start, trainable=False)

        start = np.random.default_rng(1).normal(scale=0.5, size=(CODES, SIZE))
        self.codes = weight((CODES, SIZE), "codes", keras.initializers.Constant(start))
        self.sums = weight((CODES, SIZE), "sums", keras.initializers.Constant(start))
        self.counts = weight((CODES,), "counts", "ones")

    def call(self, vectors: Any, training: bool = False) -> Any:
        distance = tf.reduce_sum((vectors[:, None] - self.codes) ** 2, axis=-1)
        nearest = tf.one_hot(tf.argmin(distance, axis=1), CODES)
        codes = tf.matmul(nearest, self.codes)
        if training:
            counts, sums = self.exchange(
                [tf.reduce_sum(nearest, axis=0), tf.matmul(nearest, vectors, transpose_a=True)]
            )
            self.counts.assign(DECAY * self.counts + (1 - DECAY) * counts)
            self.sums.assign(DECAY * self.sums + (1 - DECAY) * sums)
            total = tf.reduce_sum(self.counts)
            smooth = (self.counts + EPSILON) / (total + CODES * EPSILON) * total
            self.codes.assign(self.sums / smooth[:, None])
        return codes


class Autoencoder(keras.Model):
    """Encoder, codebook, decoder; gradients go past the codebook, straight through."""

    def __init__(self, exchange: Callable[[Any], Any]) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.encoder = keras.layers.Dense(SIZE, activation="tanh")
        self.codebook = Codebook(exchange)
        self.decoder = keras.layers.Dense(FEATURES)

    def call(self, inputs: Any, training: bool = False) -> Any:
        vectors = self.encoder(inputs)
        codes = self.codebook(vectors, training=training)
        return self.decoder(vectors + tf.stop_gradient(codes - vectors)), vectors, codes


def create_model(exchange: Callable[[Any], Any] = over_replicas) -> keras.Model:
    return Autoencoder(exchange)


def loss_of_each(loss_input: Any) -> Any:
    (found, vectors, codes), inputs = loss_input
    commitment = tf.reduce_sum((vectors - tf.stop_gradient(codes)) ** 2, axis=1)
    return tf.reduce_sum((found - inputs) ** 2, axis=1) + BETA * commitment


def create_loss() -> Any:
    return loss_of_each


def create_opt(lr: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(lr)


def input_pre(batch: Any) -> Any:
    return batch


def loss_pre(output: Any, batch: Any) -> Any:
    return output, batch


def update_pre(gradients: Any) -> Any:
    return gradients, gradients


# ---- The same as a plain loop -----------------------------------------------------------------


def hooks(exchange: Callable[[Any], Any] = over_replicas) -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_eval_dataset=create_dataset,
        create_model=functools.partial(create_model, exchange),
        create_loss=create_loss,
        create_opt=create_opt,
        input_pre=input_pre,
        loss_pre=loss_pre,
        update_pre=update_pre,
        every_steps={},
    )


@functools.cache
def train_plainly() -> tuple[keras.Model, float]:
    """Returns the model, and the mean loss of the data."""
    model, optimizer = Autoencoder(exchange=lambda values: values), keras.optimizers.SGD(RATE)
    model(INPUTS)
    for inputs in create_dataset(BATCH).filter(lambda x: len(x) == BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of_each((model(inputs, training=True), inputs)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model, float(tf.reduce_mean(loss_of_each((model(INPUTS), INPUTS))))


def evaluate_plainly() -> dict[str, float]:
    return {"loss": train_plainly()[1]}


# Each micro-batch would move the codes by itself.
PROGRAM = Program(
    hooks, lambda: train_plainly()[0].weights, metrics=evaluate_plainly, accumulates=False
)
