"""A pass over the training data as steps of global batches: what is left out, and what is cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl_core.checks.examples import checked_count, packed
from ctl_core.console import Console
from ctl_core.errors import SetupError
from ctl_core.hooks import describe
from ctl_core.pipeline import Found, Pipeline, Sizes


def whole_groups(pipeline: Pipeline, found: Found) -> tf.data.Dataset:
    """Leaves out the last elements of a pass, those that fill no step."""
    assert found.elements is not None
    if found.elements < found.together:
        raise SetupError(
            f"{pipeline.name}: the dataset has {found.elements * found.size} examples, fewer than "
            f"one global batch of {found.together * found.size}; lower batch_size, or keep them "
            "with --last-batch keep."
        )
    rest = found.elements % found.together
    return pipeline.dataset.take(found.elements - rest) if rest else pipeline.dataset


def tallied(pipeline: Pipeline, found: Found) -> tf.data.Dataset:
    """Repeats a pass without the elements that cannot be used, and keeps a tally of these.

    A counter in the pipeline that the host could read would be a state that no checkpoint can
    hold. So the tally travels with the elements, in the state of ``scan``, which one can.

    Returns:
        A dataset of (True, tally, element). The tally is an int64 vector: how many passes have
        begun, and of the first pass ``Found.left_out`` up to this element.
    """
    size, dataset = found.size, pipeline.dataset
    grouped = found.together > 1 and not pipeline.endless

    @tf.autograph.experimental.do_not_convert
    def has_size(*parts: Any) -> tf.Tensor:
        number = checked_count(pipeline.count_examples, packed(pipeline.dataset, parts))
        return tf.cast(number == size, tf.int64)

    def group(key: tf.Tensor, window: tf.data.Dataset) -> tf.data.Dataset:
        # An element is used if it has the right size and a whole group is there. (The window is
        # counted as a batch, since ``Dataset.reduce`` cannot be saved.)
        lengths = window.map(lambda *_: 0).batch(found.together).map(tf.size)

        def mark(length: tf.Tensor) -> tf.data.Dataset:
            used = tf.logical_and(key == 1, length == found.together)
            return window.map(lambda *parts: (used, packed(pipeline.dataset, parts)))

        return lengths.flat_map(mark)

    @tf.autograph.experimental.do_not_convert
    def add(state: tf.Tensor, item: Any) -> tuple[tf.Tensor, Any]:
        index, (used, element) = item if grouped else (item[0], (True, item[1]))
        number = checked_count(pipeline.count_examples, element)
        used = tf.logical_and(used, number == size)
        begun, odd, unused = (tf.cast(x, tf.int64) for x in (index == 0, number != size, ~used))
        passes = state[0] + begun
        counts = tf.stack([odd, odd * number, (1 - odd) * unused * number])
        counts = tf.where(passes < 2, state[1:4] + counts, state[1:4])
        # Passes begun since an element was used: a pass that uses none would go on for ever.
        idle = tf.where(used, tf.constant(0, tf.int64), state[4] + begun)
        tally = tf.concat([[passes], counts], 0)
        return tf.concat([tally, [idle]], 0), (used, idle < 2, tally, element)

    # No stage of a pass reads ahead here, as map may: at the end of a pass TensorFlow lets go of
    # a shuffle whose state is still wanted (see ``holds_shuffles``).
    if grouped:
        dataset = dataset.group_by_window(
            has_size,
            group,
            window_size_func=lambda key: tf.where(
                key == 1, tf.constant(found.together, key.dtype), 1
            ),
        )
    dataset = dataset.enumerate()
    dataset = dataset if pipeline.endless else dataset.repeat()
    dataset = dataset.scan(tf.zeros([5], tf.int64), add)
    dataset = dataset.take_while(lambda used, going_on, *_: going_on)
    return dataset.filter(lambda used, *_: used).map(lambda used, _, *rest: (used, *rest))


def cut(dataset: tf.data.Dataset, sizes: Sizes, with_tally: bool, name: str) -> tf.data.Dataset:
    """Cuts global batches into the shares that the replicas take one after the other."""

    def share(tensor: Any, index: tf.Tensor) -> Any:
        part = share_of(name, sizes, tensor, index * sizes.per_replica)
        if tensor.shape.rank == 0 or isinstance(part, tf.RaggedTensor):
            return part
        return tf.ensure_shape(part, [sizes.per_replica, *tensor.shape[1:]])

    @tf.autograph.experimental.do_not_convert
    def pieces(*parts: Any) -> tf.data.Dataset:
        *front, element = parts if with_tally else (packed(dataset, parts),)

        def pick(index: tf.Tensor) -> Any:
            own = tf.nest.map_structure(lambda tensor: share(tensor, index), element)
            return (*front, own) if with_tally else own

        return tf.data.Dataset.range(sizes.shares).map(
            tf.autograph.experimental.do_not_convert(pick)
        )

    return dataset.flat_map(pieces)


def share_of(name: str, sizes: Sizes, tensor: Any, start: tf.Tensor) -> Any:
    """Returns a replica's share of a tensor of a global batch: its rows from ``start`` on.

    Raises:
        SetupError: not all of the batch has as many rows.
    """
    if tensor.shape.rank == 0:
        return tensor
    if tensor.shape[0] not in (None, sizes.batch) or isinstance(tensor, tf.SparseTensor):
        raise SetupError(
            f"{name}: a global batch cannot be cut into batches of {sizes.per_replica}, since "
            f"not all of it has {sizes.batch} rows, such as {describe(tensor)}; return batches "
            "of per_replica_batch_size."
        )
    start = tf.cast(start, tf.int32)
    return tensor[start : start + sizes.per_replica]


def on_host(value: Any, name: str) -> tf.Variable:
    """Makes a variable of a number, or some, that is on the CPU once for all replicas."""
    with tf.device("CPU:0"):
        dtype = tf.float64 if isinstance(value, float) else tf.int64
        return tf.Variable(value, dtype=dtype, trainable=False, name=name)


def timed(draw: Callable[[], Any], seconds: tf.Variable) -> Any:
    """Returns what ``draw`` does, and adds how long that takes; both in a graph."""
    start = tf.timestamp()
    with tf.control_dependencies([start]):
        values = draw()
    with tf.control_dependencies(tf.nest.flatten(values, expand_composites=True)):
        seconds.assign_add(tf.timestamp() - start)
    return values


class Tally:
    """What a pass leaves out: said once, when it is known.

    Attributes:
        variable: where elements carry it, that of the last watched step; see ``tallied``
    """

    def __init__(self, pipeline: Pipeline, found: Found, sizes: Sizes, carried: bool) -> None:
        """Takes what is known.

        Args:
            pipeline: what the hooks made; a reader tells when a pass is over
            found: what was found out about it
            sizes: how a global batch is shared out
            carried: whether elements carry it
        """
        self.variable = on_host([0] * 4, "tally") if carried else None
        self._of = pipeline, found, sizes
        self._told = False

    def say(self, console: Console, following: Any = None) -> None:
        """Says it, if it is known.

        Args:
            console: where
            following: an iterator, if training has ended, so that no more will be known; where no
                step was watched, its next element is drawn for the tally
        """
        pipeline, found, sizes = self._of
        passes, left_out = 2, found.left_out
        if left_out is None and pipeline.stream is not None:
            left_out = pipeline.stream.left_out
        if self._told or (left_out is None and self.variable is None):
            return
        if left_out is None:
            assert self.variable is not None
            if following is not None and not self.variable.numpy().any():
                with contextlib.suppress(tf.errors.OpError, StopIteration):
                    self.variable.assign(next(following)[1])
            passes, odd, odd_examples, tail = self.variable.numpy().tolist()
            left_out = odd, odd_examples, tail
        if passes < 2 and following is None:
            return
        self._told = True
        number, line = said_left_out(pipeline.name, found, sizes, passes, left_out)
        if number == 1 and not pipeline.endless:
            line = f"{line.removesuffix('.')}; --last-batch keep trains on them, too."
        if number:
            (console.warn if number > 1 else console.say)(line)


def said_left_out(
    name: str, found: Found, sizes: Sizes, passes: int, left_out: tuple[int, int, int]
) -> tuple[int, str]:
    """Says what a pass leaves out.

    Args:
        name: of the hook that makes the data
        found: what was found out about them
        sizes: how a global batch is shared out
        passes: how many have begun
        left_out: see ``Found.left_out``

    Returns:
        0 for nothing, 1 for what is to be expected, 2 for what is worth a warning; and the line.
    """
    odd, odd_examples, tail = left_out
    start = f"{name}: a pass{'' if passes > 1 else ', so far,'} leaves out"
    end = f"which fill no global batch of {sizes.batch}."
    if odd > 1 or odd_examples > found.size:
        more = f", and {tail} examples, {end}" if tail else "."
        return 2, (
            f"{start} {odd_examples} examples in {odd} elements that do not hold {found.size} "
            f"each{more}"
        )
    return min(odd_examples + tail, 1), f"{start} {odd_examples + tail} examples, {end}"


@tf.function(autograph=False)
def skip_elements(iterator: Any, count: tf.Tensor) -> None:
    """Draws ``count`` elements and drops them, in one graph call."""

    def drop(done: tf.Tensor) -> tuple[tf.Tensor]:
        next(iterator)
        return (done + 1,)

    tf.while_loop(lambda done: done < count, drop, (tf.constant(0, tf.int64),))
