"""A mixture of experts, after Keras' Switch Transformer, with a loss of the batch as a whole.

The loss is a product of two means over the batch, and measures how evenly experts are used. A layer
of a functional model adds it with ``add_loss``, and takes the means over all replicas.
"""

import functools
from typing import Any

import keras
import numpy as np
from keras import ops

import ctl_core
from tests.golden import small
from tests.golden.catalogue import Program

WORDS = 20
LENGTH = 6
SIZE = 4
EXPERTS = 3
RANDOM = np.random.default_rng(0)
TEXTS = RANDOM.integers(0, WORDS, (40, LENGTH))
LABELS = RANDOM.integers(0, 2, 40)
create_dataset = small.slices((TEXTS, LABELS))


class Switch(keras.layers.Layer):
    """Sends each word to the expert with the highest score of the router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = keras.layers.Dense(EXPERTS)
        self.experts = [keras.layers.Dense(SIZE, "tanh") for _ in range(EXPERTS)]

    def build(self, shape: Any) -> None:
        for layer in (self.router, *self.experts):
            layer.build((None, SIZE))

    def call(self, inputs: Any) -> Any:
        words = ops.reshape(inputs, [-1, SIZE])
        shares = ops.softmax(self.router(words))
        chosen = ops.one_hot(ops.argmax(shares, axis=-1), EXPERTS)
        means = [ctl_core.all_reduce(ops.mean(each, axis=0), "mean") for each in (chosen, shares)]
        self.add_loss(EXPERTS * ops.sum(means[0] * means[1]))
        gates = ops.split(chosen * shares, EXPERTS, axis=-1)
        pairs = zip(gates, self.experts, strict=True)
        return ops.reshape(sum(gate * expert(words) for gate, expert in pairs), ops.shape(inputs))


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    words = keras.Input((LENGTH,))
    x = keras.layers.Embedding(WORDS, SIZE, "normal")(words)
    x = keras.layers.GlobalAveragePooling1D()(x + Switch()(x))
    model = keras.Model(words, keras.layers.Dense(2)(x))
    model(TEXTS[:1])  # users call a new model like this to test it
    return model


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_eval_dataset=create_dataset,
    create_model=create_model,
    create_loss=lambda: small.crossentropy,
)


# In micro-batches, the shares of the experts would differ.
PROGRAM = Program(hooks, accumulates=False)
