"""Helpers for ``create_dataset``: shuffles by index, seeds, rows of a process, buckets, splits.

Shuffles and seeds are computed from the number of examples since the start of the run, so a
checkpoint needs to save nothing else. These datasets are endless, so the length of a run that uses
them is given in steps.

The split or the fold of an example depends only on the hash of its key. Examples with the same key,
such as all pictures of one patient, therefore stay together. The hash is FarmHash's Fingerprint64,
which TensorFlow promises never to change.
"""

import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from ctl_core.types import Count, Structure

# Keys are strings or whole numbers, in a tensor, an array or a nested list, or a single key.
Keys: TypeAlias = Any

# The number of examples in an endless dataset: more than any run uses.
_ENDLESS = 2**40
_HASHES = 2**62

# Returns the dataset of an index shuffle, given the number of its first example.
ShuffleFrom: TypeAlias = Callable[[int], tf.data.Dataset]
# Selects the rows of a process. The second argument is None unless the dataset is an index shuffle.
SelectRows: TypeAlias = Callable[[tf.data.Dataset, ShuffleFrom | None], tf.data.Dataset]
# The function that ``own_rows`` calls. The engine sets it while it calls a data hook.
ROW_SELECTION: contextvars.ContextVar[SelectRows | None] = contextvars.ContextVar(
    "row_selection", default=None
)


def index_shuffle(examples: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns an endless dataset of shuffled indices, for data that are in memory.

    Use it as ``index_shuffle(n, b, seed).map(lambda i: tf.gather(images, i))``. Its elements are
    int64 vectors of shape [batch_size]. Each pass has every index once, in a different order. A
    batch may contain the last indices of one pass and the first ones of the next.

    Unlike ``Dataset.shuffle``, it needs no buffer, which each checkpoint would have to save.
    """
    _refuse_batch_size(examples, batch_size)

    def shuffle_from(first: int) -> tf.data.Dataset:
        pairs = _shuffle_from(first, examples, batch_size, seed)
        return pairs.map(lambda index, _: index)

    return _note_shuffle(shuffle_from)


def index_shuffle_with_seeds(examples: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns the dataset of ``index_shuffle``, with seeds for random changes to examples.

    Its elements are pairs of indices and seeds. The seeds are an int64 tensor of shape
    [batch_size, 2]; ``tf.map_fn`` can pass each of its rows to a ``tf.random.stateless_*`` op.
    """
    _refuse_batch_size(examples, batch_size)
    return _note_shuffle(lambda first: _shuffle_from(first, examples, batch_size, seed))


def _refuse_batch_size(examples: int, batch_size: int) -> None:
    if not 1 <= batch_size <= examples:
        raise ValueError(f"batch_size must lie between 1 and {examples} examples, got {batch_size}")


def _shuffle_from(first: int, examples: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns the dataset of ``index_shuffle_with_seeds`` without its first ``first`` examples."""

    def shuffled(position: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        key = tf.random.stateless_uniform([2], [seed, number], None, None, tf.uint32)
        return tf.random.experimental.index_shuffle(position, key, examples - 1)

    def pick(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        count = start + tf.range(batch_size, dtype=tf.int64)
        number = count // examples
        position = count % examples
        # A batch is no larger than a pass, so it contains examples of at most two passes.
        this_pass = shuffled(position, number[0])
        next_pass = shuffled(position, number[0] + 1)
        index = tf.where(tf.equal(number, number[0]), this_pass, next_pass)
        return index, tf.stack([tf.fill([batch_size], tf.constant(seed, tf.int64)), count], axis=1)

    return tf.data.Dataset.range(first, _ENDLESS, batch_size).repeat().map(pick)


def _note_shuffle(shuffle_from: ShuffleFrom) -> tf.data.Dataset:
    """Returns an index shuffle from its start, and notes how ``own_rows`` starts it later."""
    dataset: Any = shuffle_from(0)
    dataset.shuffle_from = shuffle_from
    shuffle: tf.data.Dataset = dataset
    return shuffle


def own_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the examples that this process of a cluster prepares; in one process, all examples.

    Call it in ``create_dataset`` or ``create_eval_dataset``, between the part of the pipeline that
    is cheap and the part that takes time: ``own_rows(files).map(load_image).batch(b)``. Each
    process reads the whole part before, but only its own rows of each global batch after it.
    Therefore, global batches do not depend on the number of processes.

    Afterwards, elements may only be changed one by one: by ``map``, one ``batch`` or
    ``padded_batch``, ``prefetch`` and ``with_options``. A shuffle, a filter, a cache and
    ``with_seeds`` belong before it.

    Args:
        dataset: the examples, one by one, or the dataset of ``index_shuffle`` or
            ``index_shuffle_with_seeds``. All examples must have the same shapes

    Returns:
        A dataset of single examples. While the engine trains, it is endless.

    Raises:
        ValueError: the examples differ in their shapes, or the function is called inside a function
            of a dataset.
        TypeError: ``dataset`` is not a ``tf.data.Dataset``, but for example a ``PyDataset``.
    """
    if not isinstance(dataset, tf.data.Dataset):
        kind = type(dataset).__name__
        raise TypeError(f"own_rows: expected a tf.data.Dataset, got {kind}; leave out own_rows")
    if not tf.executing_eagerly():
        raise ValueError("own_rows: call it in the hook itself, not in a function of a dataset")
    shuffle_from: ShuffleFrom | None = getattr(dataset, "shuffle_from", None)
    for spec in tf.nest.flatten(dataset.element_spec):
        if isinstance(spec, tf.TensorSpec) and not spec.shape.is_fully_defined():
            raise ValueError(
                f"own_rows: the examples may differ in shape, {spec.shape}; call it before the "
                "stage that reads them, on file names or indices"
            )
    select_rows = ROW_SELECTION.get()
    if select_rows is not None:
        return select_rows(dataset, shuffle_from)
    if shuffle_from is not None:
        return dataset.unbatch()
    return dataset


def with_seeds(dataset: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """Pairs each element with its own seed, for random changes that a resumed run can reproduce.

    Use it after ``shuffle`` and before ``batch``: ``with_seeds(examples, seed).map(augment)``. The
    dataset is repeated without end, and each pass has different seeds. A seed is an int64 tensor of
    shape [2], for ``tf.random.stateless_*``. (Do not use ``tf.random.uniform`` instead, because
    checkpoints cannot save its state.)
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
    """Groups examples of similar length into global batches, and pads each batch as a whole.

    For example: ``bucket_by_length(examples, lambda words, label: tf.shape(words)[0], [10, 20, 40],
    global_batch_size)``. Replicas take their shares from a padded batch, so the padding does not
    depend on the number of replicas. Examples that do not fill a batch at the end of a pass are
    dropped. To keep all examples, call this function on the repeated dataset, in ``make_batches``.

    Args:
        dataset: the single examples, already shuffled if you want them shuffled
        length_of: returns the length of an example; called with the parts of the example
        boundaries: the lengths at which the next bucket begins, in increasing order
        global_batch_size: the number of examples in a batch
        padded_shapes: see ``Dataset.padded_batch``
        padding_values: see ``Dataset.padded_batch``
    """
    return dataset.bucket_by_sequence_length(
        lambda *example: tf.cast(length_of(*example), tf.int32),
        list(boundaries),
        [global_batch_size] * (len(boundaries) + 1),
        padded_shapes=padded_shapes,
        padding_values=padding_values,
    )


def hash_of(keys: Keys) -> tf.Tensor:
    """Returns the hash of each key, an int64 that is at least 0 and less than 2**62.

    Keys are strings or whole numbers; TensorFlow rejects others. A number has the same hash as the
    string of its digits.
    """
    keys = tf.convert_to_tensor(keys)
    if keys.dtype.is_integer:
        keys = tf.strings.as_string(keys)
    return tf.strings.to_hash_bucket_fast(keys, _HASHES)


def split_of(keys: Keys, fractions: Mapping[str, float]) -> tf.Tensor:
    """Returns the name of the split of each example: ``train``, ``validation`` or ``test``.

    It works both in a graph and eagerly. For example:
    ``dataset.filter(lambda key, x: split_of(key, {"validation": 0.1}) == "train")``.

    If you increase a fraction later, examples move only from ``train`` to that split.

    Args:
        keys: the keys of the examples, strings or whole numbers, of any shape
        fractions: the fractions of all examples that are in ``validation`` and in ``test``; all
            other examples are in ``train``

    Raises:
        ValueError: ``fractions`` has a key other than ``validation`` and ``test``.
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
    """Returns each example's fold for cross-validation, an int64 from 0 to ``folds - 1``.

    The fold of an example does not depend on its split.
    """
    return tf.strings.to_hash_bucket_fast(tf.strings.as_string(hash_of(keys)), folds)
