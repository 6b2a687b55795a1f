"""A VQ-VAE whose codebook is a moving average, after Keras' example and van den Oord et al. 2017.

The codebook is not trained by gradients. In ``call``, the layer assigns new codes to it, which are
computed from the vectors of all replicas.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program

FEATURES = 6
CODES = 5
SIZE = 3
DECAY = 0.8
BETA = 0.25
EPSILON = 1e-5
INPUTS = np.random.default_rng(0).normal(size=(44, FEATURES)).astype("float32")
Exchange = Callable[[list[Any]], list[Any]]


def over_replicas(values: list[Any]) -> list[Any]:
    if replica := tf.distribute.get_replica_context():
        values = replica.all_reduce(tf.distribute.ReduceOp.SUM, values)
    return values


class Codebook(keras.layers.Layer):
    """Replaces each vector by the nearest code.

    A code is a moving average of the vectors that it has replaced.
    """

    def __init__(self, exchange: Exchange) -> None:
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
    """Encoder, codebook and decoder. Gradients bypass the codebook (straight-through estimator)."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.encoder = keras.layers.Dense(SIZE, activation="tanh")
        self.codebook = Codebook(exchange)
        self.decoder = keras.layers.Dense(FEATURES)

    def call(self, inputs: Any, training: bool = False) -> Any:
        vectors = self.encoder(inputs)
        codes = self.codebook(vectors, training=training)
        return self.decoder(vectors + tf.stop_gradient(codes - vectors)), vectors, codes


def loss_of_each(loss_input: Any) -> Any:
    (outputs, vectors, codes), inputs = loss_input
    commitment = tf.reduce_sum((vectors - tf.stop_gradient(codes)) ** 2, axis=1)
    return tf.reduce_sum((outputs - inputs) ** 2, axis=1) + BETA * commitment


create_dataset = small.slices(INPUTS)


def hooks(exchange: Exchange = over_replicas) -> SimpleNamespace:
    return small.hooks(
        create_dataset=create_dataset,
        create_eval_dataset=create_dataset,
        create_model=lambda: Autoencoder(exchange),
        create_loss=lambda: loss_of_each,
        input_pre=lambda batch: batch,
        loss_pre=lambda output, batch: (output, batch),
    )


# Each micro-batch would update the codes separately.
PROGRAM = Program(hooks, accumulates=False)
