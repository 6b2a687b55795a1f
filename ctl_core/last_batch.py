"""``last_batch: keep``: passes whose last global batch may be smaller, so that no example is lost.

A replica takes its share of each step as before: the first replicas full ones, the last of those
that get something the rest, and others a stand-in, which is a true batch of the same step that has
no examples to count. What a share counts for is in numerics/shares.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from ctl_core.checks.examples import checked_count
from ctl_core.cluster.sync import Cluster
from ctl_core.compat import stages
from ctl_core.console import Console
from ctl_core.hooks import Hooks
from ctl_core.passes import share_of
from ctl_core.pipeline import RESHUFFLING, Found, Kept, Pipeline, Sizes


def kept(
    found: Found,
    pipeline: Pipeline,
    sizes: Sizes,
    hooks: Hooks,
    cluster: Cluster,
    console: Console | None,
) -> Found:
    """Returns what was found, with ``Found.kept`` where a pass ends with a smaller batch.

    Where none does, nothing is to be kept: the data are read as with ``drop``. In a cluster whose
    processes shard for themselves all of them take part, and make as many steps as the one with
    most elements.

    Args:
        found: of one pass; without its elements, nobody trains
        pipeline: of one pass
        sizes: how a global batch is shared out
        hooks: of which ``create_model`` may want batches of one size
        cluster: its processes
        console: to warn of batches that have lost their remainder before

    Raises:
        SetupError: elements of a pass are larger than they should be, or smaller before its end
            where a step is made of several; or the model is one for batches of one size.
    """
    if found.elements is None or found.left_out is None:
        return found
    if console is not None and pipeline.static_size() is not None:
        console.warn(
            f"{pipeline.name}: its batches are of one fixed size, so that last_batch keep gets no "
            "smaller one; leave out drop_remainder=True to keep every example."
        )
    whole, (odd, odd_examples, _) = found.elements, found.left_out
    if found.misfits:
        raise pipeline.hook.reject(
            f"{found.misfits} elements of a pass hold more than {found.size} examples, or fewer "
            "before its end; last_batch keep needs all but the last one of that size, unless each "
            "is a global batch: make them of global_batch_size, which the hook may name and the "
            "engine shares out."
        )
    elements, examples = whole + odd, whole * found.size + odd_examples
    own = [elements, examples]
    table = cluster.gather(own) if pipeline.sharded else [own]
    parts = [(int(part[0]), int(part[1])) for part in table]
    even = all(part == parts[0] for part in parts)
    if even and not odd and whole % found.together == 0:
        return found
    if "per_replica_batch_size" in hooks.create_model.arguments and pipeline.static_size() is None:
        raise hooks.create_model.reject(
            "names per_replica_batch_size, for a model of batches of one size, but with last_batch "
            "keep the last one of a pass is smaller; leave out one of the two."
        )
    steps = -(-max(part[0] for part in parts) // found.together)
    numbers = Kept(elements, examples, tuple(part[1] for part in parts), steps)
    return dataclasses.replace(found, left_out=(0, 0, 0), kept=numbers)


def whole_passes(pipeline: Pipeline, found: Found, sizes: Sizes) -> tf.data.Dataset:
    """Repeats a pass, dealt out in shares that fill whole steps.

    Returns:
        A dataset of ((examples, together), element), one for each replica's share in turn, where
        the former two are an int64 vector: how many examples the share has, and how many the
        micro-batch over all replicas. A share without examples has an element all the same.
    """
    shares = _cut if found.together == 1 and not pipeline.sharded else _filled
    # No stage of a pass that reads ahead may stand before repeat, see ``tallied``.
    assert found.kept is not None
    if pipeline.stream is not None:
        kept = found.kept
        if pipeline.sharded and kept.steps * found.together - kept.elements >= found.together:
            pipeline.stream.why_not = "this process has fewer steps in a pass than others"
        dataset = pipeline.stream.in_steps(found.size, found.together, kept.elements, True)
        return shares(pipeline, found, sizes, dataset)
    dataset = pipeline.dataset.enumerate().repeat()
    if any(type(stage).__name__ in _WITH_STATE for stage in stages(pipeline.dataset)):
        dataset = _held_back(dataset, found.kept.elements - 1)
    return shares(pipeline, found, sizes, dataset)


def _held_back(dataset: tf.data.Dataset, last: int) -> tf.data.Dataset:
    """Gives out the last element of a pass when the first of the next has been read.

    Where it is smaller, what has batched it has read its pass to the end, and until the next pass
    begins, a shuffle before it has no state that a checkpoint could hold.

    Args:
        dataset: repeated, of (index in the pass, element)
        last: the index of the last element
    """

    def parts(item: Any) -> tuple[tf.Tensor, ...]:  # a state is of dense tensors
        return tuple(tf.nest.flatten(item, expand_composites=True))

    @tf.autograph.experimental.do_not_convert
    def exchange(held: Any, item: Any) -> Any:
        return (item[0] == last, parts(item)), (*held, item)

    @tf.autograph.experimental.do_not_convert
    def pieces(there: tf.Tensor, held: Any, item: Any) -> tf.data.Dataset:
        held = tf.nest.pack_sequence_as(item, held, expand_composites=True)
        before = tf.data.Dataset.from_tensors(held).take(tf.cast(there, tf.int64))
        now = tf.data.Dataset.from_tensors(item).take(tf.cast(item[0] != last, tf.int64))
        return before.concatenate(now)

    nothing = parts(tf.nest.map_structure(_nothing, dataset.element_spec))
    return dataset.scan((tf.constant(False), nothing), exchange).flat_map(pieces)


def _nothing(spec: tf.TypeSpec) -> Any:
    """Returns something small of a type, dense, ragged or sparse."""
    if isinstance(spec, tf.RaggedTensorSpec):
        sizes = [size or 0 for size in spec.shape[spec.ragged_rank + 1 :]]
        ragged = tf.zeros([0, *sizes], spec.dtype)
        for _ in range(spec.ragged_rank):
            ragged = tf.RaggedTensor.from_row_splits(ragged, tf.zeros([1], spec.row_splits_dtype))
        return ragged
    if isinstance(spec, tf.SparseTensorSpec):
        rank = spec.shape.rank
        indices, size = tf.zeros([0, rank], tf.int64), tf.zeros([rank], tf.int64)
        return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), size)
    return tf.zeros([size or 0 for size in (spec.shape if spec.shape.rank else ())], spec.dtype)


def _cut(
    pipeline: Pipeline, found: Found, sizes: Sizes, dataset: tf.data.Dataset
) -> tf.data.Dataset:
    """Cuts elements that are a global batch each, or what is there of it."""
    most = sizes.per_replica

    def examples_of(element: Any) -> tf.Tensor:
        number = checked_count(pipeline.count_examples, element)
        fits = tf.debugging.Assert((number > 0) & (number <= sizes.batch), [_FITS, number])
        with tf.control_dependencies([fits]):
            return tf.identity(number)

    @tf.autograph.experimental.do_not_convert
    def whole(_: tf.Tensor, element: Any) -> Any:
        number = examples_of(element)
        return tf.stack([number, number]), element

    @tf.autograph.experimental.do_not_convert
    def pieces(_: tf.Tensor, element: Any) -> tf.data.Dataset:
        number = examples_of(element)

        @tf.autograph.experimental.do_not_convert
        def pick(index: tf.Tensor) -> Any:
            first = index // sizes.replicas * sizes.replicas * most
            examples = tf.clip_by_value(number - index * most, 0, most)
            together = tf.clip_by_value(number - first, 0, sizes.replicas * most)
            start = tf.where(examples > 0, index * most, 0)
            own = tf.nest.map_structure(
                lambda tensor: share_of(pipeline.name, sizes, tensor, start), element
            )
            return tf.stack([examples, together]), own

        return tf.data.Dataset.range(sizes.shares).map(pick)

    return dataset.map(whole) if sizes.shares == 1 else dataset.flat_map(pieces)


def _filled(
    pipeline: Pipeline, found: Found, sizes: Sizes, dataset: tf.data.Dataset
) -> tf.data.Dataset:
    """Puts copies of the last element of a pass behind it, as far as its last step has room."""
    numbers, size = found.kept, found.size
    assert numbers is not None
    width = found.together // sizes.accumulate_steps
    missing = numbers.steps * found.together - numbers.elements
    last = numbers.elements - 1

    def follows(before: tf.Tensor, item: Any) -> tuple[tf.Tensor, Any]:
        index, element = item
        ended = tf.debugging.Assert((index > 0) | (before == last), [_LENGTH, before + 1])
        with tf.control_dependencies([ended]):
            return tf.identity(index), (tf.identity(index), element)

    @tf.autograph.experimental.do_not_convert
    def pieces(index: tf.Tensor, element: Any) -> tf.data.Dataset:
        number = checked_count(pipeline.count_examples, element)
        expected = tf.clip_by_value(numbers.own - index * size, 0, size)
        as_counted = tf.debugging.Assert(number == expected, [_LENGTH, index + 1])
        with tf.control_dependencies([as_counted]):
            number = tf.identity(number)

        @tf.autograph.experimental.do_not_convert
        def pick(copy: tf.Tensor) -> Any:
            first = (index + copy) // width * width * size
            parts = [tf.clip_by_value(n - first, 0, width * size) for n in numbers.examples]
            examples = tf.where(copy == 0, number, 0)
            return tf.stack([examples, tf.add_n(parts)]), element

        copies = 1 + missing * tf.cast(index == last, tf.int64)
        return tf.data.Dataset.range(copies).map(pick)

    start = tf.constant(last, tf.int64)
    return dataset.scan(start, tf.autograph.experimental.do_not_convert(follows)).flat_map(pieces)


@tf.function(autograph=False)
def skip_examples(iterator: Any, count: tf.Tensor, shares: int, in_step: int) -> tf.Tensor:
    """Draws whole steps and drops them, until so many examples are gone, in one graph call.

    Args:
        iterator: of what ``whole_passes`` returned
        count: of examples, over all processes; an int64 scalar
        shares: that this process draws for a micro-batch
        in_step: micro-batches in a step

    Returns:
        How many steps that was, an int64 scalar.
    """

    def drop(gone: tf.Tensor, steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for _ in range(in_step):
            drawn = [next(iterator) for _ in range(shares)]
            gone += drawn[0][0][1]
        return gone, steps + 1

    start = (tf.constant(0, tf.int64), tf.constant(0, tf.int64))
    return tf.while_loop(lambda gone, _: gone < count, drop, start)[1]


# Stages whose state is lost once they have been read to their end; see ``holds_shuffles``.
_WITH_STATE = {*RESHUFFLING, "CacheDataset"}
_FITS = "a global batch holds no examples, or more than batch_size"
_LENGTH = (
    "a pass is not as long as the one that was read to count its examples, which last_batch keep "
    "needs; at its element"
)
