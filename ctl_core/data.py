"""Helpers for ``create_dataset``: shuffles by index, seeds for examples, length buckets, splits.

Shuffles and seeds work everything out from the number of examples since the start of the run: a
checkpoint need hold nothing else. They never end: a run with them is measured in steps.

An example's split or fold depends on the hash of its own key and nothing else, so that examples of
one key, such as all pictures of one patient, stay together. The hash is FarmHash's Fingerprint64,
which TensorFlow promises never to change.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from ctl_core.types import Count, Structure

# Strings or whole numbers: a tensor, an array, a nested list, or a single key.
Keys: TypeAlias = Any

_ENDLESS = 2**40  # examples, more than any run sees
_HASHES = 2**62


def index_shuffle(examples: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """Shuffles indices of data in memory: a ``Dataset.shuffle`` has its buffer in each checkpoint.

    ``index_shuffle(n, b, seed).map(lambda i: tf.gather(images, i))`` is endless. Its int64 vectors
    of shape [batch_size] have each index once a pass, in another order each time; a batch may run
    over the end of a pass.
    """
    return index_shuffle_with_seeds(examples, batch_size, seed).map(lambda index, _: index)


def index_shuffle_with_seeds(examples: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """The same in pairs with seeds for random changes to examples, int64 of [batch_size, 2].

    They are for ``tf.random.stateless_*`` through ``tf.map_fn``.
    """
    if not 1 <= batch_size <= examples:
        raise ValueError(f"batch_size must lie between 1 and {examples} examples, got {batch_size}")

    def shuffled(position: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        key = tf.random.stateless_uniform([2], [seed, number], None, None, tf.uint32)
        return tf.random.experimental.index_shuffle(position, key, examples - 1)

    def pick(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        count = first + tf.range(batch_size, dtype=tf.int64)
        number = count // examples
        position = count % examples
        # A batch is no longer than a pass, so it has examples of two passes at most.
        this_pass = shuffled(position, number[0])
        next_pass = shuffled(position, number[0] + 1)
        index = tf.where(tf.equal(number, number[0]), this_pass, next_pass)
        return index, tf.stack([tf.fill([batch_size], tf.constant(seed, tf.int64)), count], axis=1)

    return tf.data.Dataset.range(0, _ENDLESS, batch_size).repeat().map(pick)


def with_seeds(dataset: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """Pairs each element with a seed of its own, for random changes that a resumed run repeats.

    Use it after ``shuffle`` and before ``batch``: ``with_seeds(examples, seed).map(augment)``. A
    seed is int64 of shape [2], for ``tf.random.stateless_*``, and another one in each pass of the
    dataset, which is repeated without end. (``tf.random.uniform`` keeps a state that no checkpoint
    can hold.)
    """

    def pair(count: tf.Tensor, element: Structure) -> tuple[Structure, tf.Tensor]:
        return element, tf.stack([tf.constant(seed, tf.int64), count])

    return dataset.repeat().enumerate().map(pair)


def bucket_by_length(
    dataset: tf.data.Dataset,
    length_of: Callable[..., Count],
    boundaries: Sequence[int],
    global_batch_size: int,
    padded_shapes: Structure = None,
    padding_values: Structure = None,
) -> tf.data.Dataset:
    """Groups examples of about the same length into global batches, and pads each as a whole.

    ``bucket_by_length(examples, lambda words, label: tf.shape(words)[0], [10, 20, 40],
    global_batch_size)``: replicas take their shares of a batch, so that padding does not depend on
    their number. Examples that fill no batch at the end of a pass are left out; to lose none, use
    it on the repeated dataset, in ``make_batches``.

    Args:
        dataset: single examples, shuffled if they are to be
        length_of: called with the parts of an example, returns its length
        boundaries: lengths at which the next bucket begins, increasing
        global_batch_size: examples in a batch
        padded_shapes, padding_values: as of ``Dataset.padded_batch``
    """
    return dataset.bucket_by_sequence_length(
        lambda *example: tf.cast(length_of(*example), tf.int32),
        list(boundaries),
        [global_batch_size] * (len(boundaries) + 1),
        padded_shapes=padded_shapes,
        padding_values=padding_values,
    )


def hash_of(keys: Keys) -> tf.Tensor:
    """Returns the hash of each key, int64 from 0 up to below 2**62; a number's is that of its text.

    Keys are strings or whole numbers; TensorFlow refuses others.
    """
    keys = tf.convert_to_tensor(keys)
    if keys.dtype.is_integer:
        keys = tf.strings.as_string(keys)
    return tf.strings.to_hash_bucket_fast(keys, _HASHES)


def split_of(keys: Keys, fractions: Mapping[str, float]) -> tf.Tensor:
    """Returns the name of each example's split, in a graph or outside.

    ``dataset.filter(lambda key, x: split_of(key, {"validation": 0.1}) == "train")``: fractions say
    how much of all goes to ``validation`` and to ``test``; the rest is ``train``, from which a part
    that grows takes. Keys are strings or whole numbers, of any shape.

    Raises:
        ValueError: a name is another one.
    """
    validation = fractions.get("validation", 0.0)
    test = fractions.get("test", 0.0)
    other_names = sorted(set(fractions) - {"validation", "test"})
    if other_names:
        raise ValueError(f"fractions: expected validation and test, got {', '.join(other_names)}")
    hashes = hash_of(keys)
    names = tf.where(hashes >= int((1 - validation) * _HASHES), "validation", "train")
    return tf.where(hashes < int(test * _HASHES), "test", names)


def fold_of(keys: Keys, folds: int) -> tf.Tensor:
    """Returns each example's fold for cross-validation, int64 from 0 up to below ``folds``.

    It has nothing to do with the example's split.
    """
    return tf.strings.to_hash_bucket_fast(tf.strings.as_string(hash_of(keys)), folds)
