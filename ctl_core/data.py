"""Helpers for ``create_dataset``: what makes a pipeline exact and cheap to resume.

Both work in whole passes; the engine repeats them, and each pass draws new numbers. They give
the same examples and seeds whatever the batch size per replica is.
"""

from __future__ import annotations

import tensorflow as tf


def index_shuffle(examples: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """Shuffles indices instead of examples: a full shuffle that has next to no state.

    For data in memory: ``index_shuffle(n, b, seed).map(lambda i: tf.gather(images, i))``. A
    ``Dataset.shuffle`` writes its buffer of examples into every checkpoint, this one two numbers.

    Args:
        examples: how many examples there are
        batch_size: how many indices an element holds
        seed: where the order of the passes starts from

    Returns:
        A dataset of one pass: int64 vectors of shape [batch_size], each index at most once, the
        last ones left out if they fill no batch; each pass in another order.

    Raises:
        ValueError: there are fewer examples than one batch.
    """
    return index_shuffle_with_seeds(examples, batch_size, seed).map(lambda index, _: index)


def index_shuffle_with_seeds(examples: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """The same, with a seed for each example, for random changes to it.

    Returns:
        A dataset of pairs: indices, int64 of shape [batch_size], and seeds, int64 of shape
        [batch_size, 2], to use with ``tf.random.stateless_*``.

    Raises:
        ValueError: there are fewer examples than one batch.
    """
    if not 1 <= batch_size <= examples:
        raise ValueError(f"batch_size must lie between 1 and {examples} examples, got {batch_size}")
    # Drawn anew whenever the dataset is iterated again: once a pass.
    numbers = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    pass_key = numbers.batch(2, drop_remainder=True).take(1)
    positions = tf.data.Dataset.range(examples).batch(batch_size, drop_remainder=True)

    def one_pass(key: tf.Tensor) -> tf.data.Dataset:
        shuffle_key = tf.cast(key, tf.uint32)

        def pick(position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            index = tf.random.experimental.index_shuffle(position, shuffle_key, examples - 1)
            seeds = tf.stack([key[0] + index, tf.repeat(key[1], batch_size)], axis=1)
            return index, seeds

        return positions.map(pick)

    length = tf.data.experimental.assert_cardinality(examples // batch_size)
    return pass_key.flat_map(one_pass).apply(length)


def with_seeds(dataset: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """Gives each element a seed of its own, for random changes that a resumed run repeats.

    Use it before ``batch``: ``with_seeds(examples, seed).map(lambda x, s: (augment(x, s)))``. A
    ``tf.random.uniform`` inside ``map`` keeps a state that no checkpoint can hold.

    Returns:
        A dataset of pairs: the element, and an int64 seed of shape [2] for
        ``tf.random.stateless_*``; each pass gets new seeds.
    """
    numbers = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    seeds = numbers.batch(2, drop_remainder=True)
    return tf.data.Dataset.zip((dataset, seeds))
