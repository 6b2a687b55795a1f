"""Helpers for ``create_dataset``: shuffles by index, seeds for examples, length buckets, splits.

Shuffles and seeds count the examples from the start of the run and work everything out from that
number, so that a checkpoint need hold nothing but the count. (``Dataset.random`` and reshuffling
keep a state that TensorFlow loses where a stage behind them has read a pass to its end.) They never
end: a run with them is measured in steps, not epochs.

An example's split or fold depends on the hash of its own key and nothing else: not on the other
examples, their order, the machine or Python's hash seed. Examples of one key, such as all pictures
of one patient, stay together. The hash is FarmHash's Fingerprint64, which TensorFlow promises never
to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

_ENDLESS = 2**40  # examples, more than any run sees
_HASHES = 2**62


def index_shuffle(examples: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """Shuffles indices instead of examples: a full shuffle that has next to no state.

    For data in memory: ``index_shuffle(n, b, seed).map(lambda i: tf.gather(images, i))``. A
    ``Dataset.shuffle`` writes its buffer of examples into every checkpoint, this one a number.

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

    Use it after ``shuffle`` and before ``batch``: ``with_seeds(examples, seed).map(augment)``. A
    ``tf.random.uniform`` inside ``map`` keeps a state that no checkpoint can hold.

    Returns:
        The dataset, repeated without end, as pairs: the element, and an int64 seed of shape [2]
        for ``tf.random.stateless_*``, another one in each pass.
    """

    def pair(count: tf.Tensor, element: Any) -> tuple[Any, tf.Tensor]:
        return element, tf.stack([tf.constant(seed, tf.int64), count])

    return dataset.repeat().enumerate().map(pair)


def bucket_by_length(
    dataset: tf.data.Dataset,
    length_of: Callable[..., Any],
    boundaries: Sequence[int],
    global_batch_size: int,
    padded_shapes: Any = None,
    padding_values: Any = None,
) -> tf.data.Dataset:
    """Groups examples of about the same length into global batches, and pads each as a whole.

    In a hook that names ``global_batch_size``::

        def create_dataset(global_batch_size):
            return bucket_by_length(
                examples, lambda words, label: tf.shape(words)[0], [10, 20, 40], global_batch_size
            )

    The engine cuts a global batch into the replicas' shares: a step has the same examples with the
    same padding on any number of replicas. Examples that fill no batch of their bucket at the end
    of a pass are left out; to lose none, use it on the repeated dataset, in ``make_batches``.

    Args:
        dataset: single examples, shuffled if they are to be; not sharded by the hook
        length_of: called with the parts of an example, returns its length, an integer scalar
        boundaries: where a bucket ends and the next begins, increasing; a length that equals one
            is in the next
        global_batch_size: examples in a batch
        padded_shapes: to what to pad, as of ``Dataset.padded_batch``; default: the longest
        padding_values: with what, as of ``Dataset.padded_batch``; default: 0 or ""
    """
    return dataset.bucket_by_sequence_length(
        lambda *example: tf.cast(length_of(*example), tf.int32),
        list(boundaries),
        [global_batch_size] * (len(boundaries) + 1),
        padded_shapes=padded_shapes,
        padding_values=padding_values,
    )


def hash_of(keys: Any) -> tf.Tensor:
    """Returns the hash of each key: int64, from 0 up to below 2**62, of the shape of ``keys``.

    Whole numbers are hashed as they are written down.

    Raises:
        ValueError: keys are neither strings nor whole numbers.
    """
    keys = tf.convert_to_tensor(keys)
    if keys.dtype.is_integer:
        keys = tf.strings.as_string(keys)
    if keys.dtype != tf.string:
        raise ValueError(f"keys: expected strings or whole numbers, got {keys.dtype.name}")
    return tf.strings.to_hash_bucket_fast(keys, _HASHES)


def split_of(keys: Any, fractions: Mapping[str, float]) -> tf.Tensor:
    """Returns the name of each example's split, in a graph or outside.

    ``dataset.filter(lambda key, x: split_of(key, {"validation": 0.1}) == "train")``, for data of
    your own. A part that grows takes from ``train`` only, as long as all fit.

    Args:
        keys: strings or whole numbers, of any shape
        fractions: how much of all goes to ``validation`` and to ``test``; the rest is ``train``

    Returns:
        Strings of the shape of ``keys``.

    Raises:
        ValueError: keys are of another type, a name is another one, or the fractions do not lie
            between 0 and 1 together.
    """
    validation, test = fractions.get("validation", 0.0), fractions.get("test", 0.0)
    if others := sorted(set(fractions) - {"validation", "test"}):
        raise ValueError(f"fractions: expected validation and test, got {', '.join(others)}")
    if min(validation, test) < 0 or validation + test >= 1:
        raise ValueError(f"fractions must be from 0 up and leave some for train, got {fractions}")
    hashes = hash_of(keys)
    names = tf.where(hashes >= int((1 - validation) * _HASHES), "validation", "train")
    return tf.where(hashes < int(test * _HASHES), "test", names)


def fold_of(keys: Any, folds: int) -> tf.Tensor:
    """Returns each example's fold for cross-validation, which has nothing to do with its split.

    Args:
        keys: strings or whole numbers, of any shape
        folds: how many there are

    Returns:
        int64, from 0 up to below ``folds``, of the shape of ``keys``.
    """
    return tf.strings.to_hash_bucket_fast(tf.strings.as_string(hash_of(keys)), folds)
