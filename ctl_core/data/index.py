"""Shuffles by index, and seeds for each example, that a resumed run repeats.

Shuffles and seeds count the examples from the start of the run and work everything out from that
number, so that a checkpoint need hold nothing but the count. (``Dataset.random`` and reshuffling
keep a state that TensorFlow loses where a stage behind them, such as a shuffle as large as the
data, has read a pass to its end before the checkpoint.) They never end: a run with them is measured
in steps, not epochs. The examples are the same whatever the batch size per replica.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_ENDLESS = 2**40  # examples, more than any run sees


def index_shuffle(examples: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """Shuffles indices instead of examples: a full shuffle that has next to no state.

    For data in memory: ``index_shuffle(n, b, seed).map(lambda i: tf.gather(images, i))``. A
    ``Dataset.shuffle`` writes its buffer of examples into every checkpoint, this one a number.

    Args:
        examples: how many examples there are
        batch_size: how many indices an element holds
        seed: where the order of the passes starts from

    Returns:
        An endless dataset of int64 vectors of shape [batch_size]: pass after pass, each index
        once in each, in another order each time. A batch may run over the end of a pass.

    Raises:
        ValueError: there are fewer examples than one batch.
    """
    return index_shuffle_with_seeds(examples, batch_size, seed).map(lambda index, _: index)


def index_shuffle_with_seeds(examples: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """The same, with a seed for each example, for random changes to it.

    Returns:
        An endless dataset of pairs: indices, int64 of shape [batch_size], and seeds, int64 of
        shape [batch_size, 2], to use with ``tf.random.stateless_*`` through ``tf.map_fn``.

    Raises:
        ValueError: there are fewer examples than one batch.
    """
    if not 1 <= batch_size <= examples:
        raise ValueError(f"batch_size must lie between 1 and {examples} examples, got {batch_size}")

    def shuffled(position: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        key = tf.random.stateless_uniform([2], [seed, number], None, None, tf.uint32)
        return tf.random.experimental.index_shuffle(position, key, examples - 1)

    def pick(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        count = first + tf.range(batch_size, dtype=tf.int64)
        number, position = count // examples, count % examples
        # A batch is no longer than a pass, so that it touches two of them at most.
        this, following = shuffled(position, number[0]), shuffled(position, number[0] + 1)
        index = tf.where(tf.equal(number, number[0]), this, following)
        return index, tf.stack([tf.fill([batch_size], tf.constant(seed, tf.int64)), count], axis=1)

    return tf.data.Dataset.range(0, _ENDLESS, batch_size).repeat().map(pick)


def with_seeds(dataset: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """Gives each element a seed of its own, for random changes that a resumed run repeats.

    Use it before ``batch``: ``with_seeds(examples, seed).map(lambda x, s: augment(x, s))``. A
    ``tf.random.uniform`` inside ``map`` keeps a state that no checkpoint can hold. Where the
    dataset is shuffled, too, shuffle it before.

    Returns:
        The dataset, repeated without end, as pairs: the element, and an int64 seed of shape [2]
        for ``tf.random.stateless_*``, another one in each pass.
    """

    def pair(count: tf.Tensor, element: Any) -> tuple[Any, tf.Tensor]:
        return element, tf.stack([tf.constant(seed, tf.int64), count])

    return dataset.repeat().enumerate().map(pair)
