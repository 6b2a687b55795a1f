"""A Transformer that predicts the next word of padded sentences.

Sentences are padded to the longest one of a global batch. The loss is the mean over words, not over
sentences. The hook ``batch_weight`` counts the words that are not padding.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program

VOCABULARY = 11
LONGEST = 9
WIDTH = 8
RANDOM = np.random.default_rng(3)
SENTENCES = [
    RANDOM.integers(1, VOCABULARY, size=RANDOM.integers(2, LONGEST + 1)).tolist() for _ in range(44)
]


def sentences() -> tf.data.Dataset:
    rows = tf.ragged.constant(SENTENCES, dtype=tf.int32)
    return tf.data.Dataset.range(len(SENTENCES)).map(lambda index: rows[index])


def create_dataset(global_batch_size: int) -> tf.data.Dataset:
    return sentences().shuffle(20, seed=2).padded_batch(global_batch_size, drop_remainder=True)


def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return sentences().padded_batch(per_replica_batch_size)


class Block(keras.layers.Layer):
    """Causal attention without padding, followed by two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, WIDTH // 2)
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.hidden = keras.layers.Dense(2 * WIDTH, activation="gelu")
        self.out = keras.layers.Dense(WIDTH)

    def call(self, inputs: Any) -> Any:
        x, real = inputs
        x = self.norms[0](
            x + self.attention(x, x, attention_mask=real[:, None, :], use_causal_mask=True)
        )
        return self.norms[1](x + self.out(self.hidden(x)))


class Transformer(keras.Model):
    """Embeds words and positions, applies a block, and returns logits over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(VOCABULARY, WIDTH, "random_normal")
        self.places = keras.layers.Embedding(LONGEST, WIDTH, "random_normal")
        self.block = Block()
        self.head = keras.layers.Dense(VOCABULARY, kernel_regularizer=keras.regularizers.L2(0.01))

    def call(self, inputs: Any) -> Any:
        x = 20.0 * (self.words(inputs) + self.places(tf.range(tf.shape(inputs)[1])))
        return self.head(self.block((x, inputs > 0)))


def create_model() -> keras.Model:
    keras.utils.set_random_seed(4)
    return Transformer()


def real_words(target: Any) -> Any:
    return tf.cast(target > 0, tf.float32)


def crossentropy(loss_input: Any) -> Any:
    """Returns the cross-entropy of each sentence, summed over its words."""
    output, target = loss_input
    each = keras.losses.sparse_categorical_crossentropy(target, output, from_logits=True)
    return tf.reduce_sum(each * real_words(target), axis=1)


def batch_weight(batch: Any) -> Any:
    return tf.reduce_sum(real_words(batch[:, 1:]))


def metric_pre(output: Any, batch: Any) -> Any:
    # All words are in one row. If rows were sentences, Keras would first take the mean of each
    # sentence, which depends on its padding.
    target = tf.reshape(batch[:, 1:], [-1])
    return target, tf.reshape(output, [-1, VOCABULARY]), real_words(target)


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_eval_dataset=create_eval_dataset,
    create_model=create_model,
    create_loss=lambda: crossentropy,
    input_pre=lambda batch: batch[:, :-1],
    loss_pre=lambda output, batch: (output, batch[:, 1:]),
    batch_weight=batch_weight,
    create_metrics=lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    metric_pre=metric_pre,
)


PROGRAM = Program(hooks, ignored="key/bias$")
