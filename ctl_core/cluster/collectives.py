"""What replicas exchange in a hook of the graph, or in a layer; alone, everything stays as it is.

Between processes as between devices; gradients go through both exchanges. A replica that has no
rows of a batch computes on a stand-in, which counts in no exchange.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


class _Thread(threading.local):
    """What is known in a thread: each replica is traced in its own."""

    find_offset: Callable[[], tf.Tensor] | None = None


_thread = _Thread()


def distribute(strategy: tf.distribute.Strategy, values: list[Any]) -> Any:
    """Hands the i-th value to the i-th replica of this process."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group % len(values)]
    )


def count_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Counts the replicas of this process; every process of a cluster has as many."""
    return len(strategy.extended.worker_devices)


def _find_others() -> Any:
    """Returns the context of this replica, if there are others."""
    context = tf.distribute.get_replica_context()
    return None if context is None or context.num_replicas_in_sync == 1 else context


def num_replicas() -> int:
    """Returns how many replicas there are, over all processes."""
    context = tf.distribute.get_replica_context() or tf.distribute.get_strategy()
    return context.num_replicas_in_sync  # type: ignore[no-any-return]


def replica_id() -> Any:
    """Returns this replica's number, from 0: a number where it is fixed, otherwise a tensor."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


def row_offset() -> tf.Tensor:
    """Returns the index of this replica's first row in what ``all_gather`` returns.

    Replicas may differ in how many rows they have, so that this is no multiple of ``replica_id()``.
    For tensors that have a row for each example, as those of a batch, row ``i`` of this replica is
    row ``ctl.row_offset() + i`` of the gathered tensor.

    Returns:
        An int32 scalar; 0 on one device, and outside of a step or an evaluation.
    """
    find_offset = _thread.find_offset
    if find_offset is None or _find_others() is None:
        return tf.constant(0)
    return find_offset()


@contextlib.contextmanager
def place_rows(find_offset: Callable[[], tf.Tensor]) -> Iterator[None]:
    """Temporarily makes ``row_offset`` return what a function computes, in this thread."""
    before = _thread.find_offset
    _thread.find_offset = find_offset
    try:
        yield
    finally:
        _thread.find_offset = before


def find_offset_in_share(rows: Any, together: Any = None) -> tf.Tensor:
    """Returns ``row_offset`` where the replicas' numbers of rows differ by at most one.

    Args:
        rows: how many rows this replica has
        together: how many rows all replicas have; None: each has ``rows``, or replica 0 has all
    """
    replica = tf.cast(replica_id(), tf.int32)
    if together is None:
        return replica * tf.cast(rows, tf.int32)
    together = tf.cast(together, tf.int32)
    size = together // num_replicas()
    longer = together % num_replicas()  # replicas with one row more, which come first
    # With fewer rows than replicas, those without rows have a stand-in of one row.
    return tf.where(size == 0, replica, replica * size + tf.minimum(replica, longer))


def all_gather(value: Any, axis: int = 0) -> Any:
    """Returns what all replicas have, joined along an axis in their order, the same on each.

    ``value`` is a tensor, or a structure of tensors, of one shape but for the axis. The gradient is
    the sum of all replicas': of a loss that each of N replicas works out of the whole gathered
    batch, return the N-th part from ``grad_pre``, or the loss of the replica's own examples.
    """
    # What comes straight out of a batch is on no device, to which TensorFlow would bring this. On
    # a single replica, too, the op shows that values are exchanged here: see model/loss_calls.py.
    value = tf.nest.map_structure(tf.identity, value)
    context = _find_others()  # no walrus: AutoGraph converts this function, and knows none
    if context is None:
        return value
    return tf.nest.map_structure(lambda part: context.all_gather(part, axis), value)


def all_reduce(value: Any, op: str = "sum") -> Any:
    """Returns the "sum", or the "mean", of tensors of floating-point numbers over all replicas.

    A mean weighs each replica by the rows that it has of the batch.
    """
    reduce_op = tf.distribute.ReduceOp[op.upper()]
    value = tf.nest.map_structure(tf.identity, value)
    context = _find_others()
    if context is None:
        return value
    return context.all_reduce(reduce_op, value)


@contextlib.contextmanager
def weigh_by_rows(
    rows: Any, present: tf.Tensor | None, together: tf.Tensor | None = None
) -> Iterator[None]:
    """Within, on one replica: what is exchanged counts by the rows that the replica has.

    Where no replica has any, all stand-ins count alike: that is no mean of nothing.

    Args:
        rows: how many that are, where replicas differ; None: all have as many
        present: whether there are any; None: that is sure
        together: how many all replicas have; None: some, that is sure
    """
    if rows is None or (context := _find_others()) is None:
        yield
        return
    reduce, gather = context.all_reduce, context.all_gather
    if present is not None and together is not None:
        present, rows = present | (together == 0), tf.where(together == 0, 1, rows)

    def mask(part: Any) -> Any:
        if isinstance(part, tf.IndexedSlices):
            return tf.IndexedSlices(mask(part.values), part.indices, part.dense_shape)
        return part if present is None else tf.where(present, part, tf.zeros_like(part))

    def reduce_rows(op: Any, value: Any, options: Any = None) -> Any:
        def mean(part: Any) -> Any:
            weight = tf.cast(rows, part.dtype)
            total, weights = add_up([part * weight, weight])
            return total / weights

        def add_up(value: Any) -> Any:
            return reduce(tf.distribute.ReduceOp.SUM, tf.nest.map_structure(mask, value), options)

        is_sum = getattr(op, "value", op).upper() == "SUM"
        return add_up(value) if is_sum else tf.nest.map_structure(mean, value)

    def gather_rows(value: Any, axis: int, options: Any = None) -> Any:
        # Stand-ins, which are the last ones, are there for each other alone: their own code may
        # look for itself behind the rows of the replicas before it.
        def cut(part: Any, gathered: Any) -> Any:
            own = tf.where(present, tf.shape(part, tf.int64)[axis], 0)
            size, real = tf.shape(gathered, tf.int64)[axis], reduce(tf.distribute.ReduceOp.SUM, own)
            number = tf.where(present, real, size)
            return tf.split(gathered, tf.stack([number, size - number]), axis)[0]

        return tf.nest.map_structure(cut, value, gather(value, axis, options))

    context.all_reduce = reduce_rows
    if present is not None:
        context.all_gather = gather_rows
    try:
        yield
    finally:
        for name in ("all_reduce", "all_gather"):
            vars(context).pop(name, None)


class Alone(tf.distribute.ReplicaContext):
    """A replica that meets no other: what is exchanged has the right shapes and no values."""

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function as if every replica of this process gave the same."""

        def merge(strategy: tf.distribute.Strategy, args: Any, kwargs: Any) -> Any:
            def of_all(part: Any) -> Any:
                if not isinstance(part, tf.Tensor | tf.IndexedSlices):
                    return part
                return distribute(strategy, [part] * count_local_replicas(strategy))

            args, kwargs = tf.nest.map_structure(of_all, (args, kwargs))
            merged = merge_fn(strategy, *args, **kwargs)
            return tf.nest.map_structure(
                lambda part: strategy.experimental_local_results(part)[0], merged
            )

        return super().merge_call(merge, (args, kwargs or {}))

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns the value as it is."""
        return tf.nest.map_structure(tf.identity, value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Returns the value once for each replica."""
        replicas = self.strategy.num_replicas_in_sync

        def repeat(part: Any) -> Any:
            return tf.concat([tf.identity(part)] * replicas, axis)

        return tf.nest.map_structure(repeat, value)
