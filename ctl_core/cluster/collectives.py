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
    """The state of a thread: each replica is traced in its own."""

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
    """Returns the index of this replica's first row in the result of ``all_gather``.

    Replicas may differ in how many rows they have, so this is not a multiple of ``replica_id()``.
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
    """Temporarily makes ``row_offset`` return the result of a function, in this thread."""
    before = _thread.find_offset
    _thread.find_offset = find_offset
    try:
        yield
    finally:
        _thread.find_offset = before


def find_offset_in_share(rows: Any, rows_of_all: Any = None) -> tf.Tensor:
    """Returns ``row_offset`` where the replicas' numbers of rows differ by at most one.

    Args:
        rows: how many rows this replica has
        rows_of_all: how many rows all replicas have; None: each has ``rows``, or replica 0 has all
    """
    replica = tf.cast(replica_id(), tf.int32)
    if rows_of_all is None:
        return replica * tf.cast(rows, tf.int32)
    rows_of_all = tf.cast(rows_of_all, tf.int32)
    size = rows_of_all // num_replicas()
    longer = rows_of_all % num_replicas()  # replicas with one row more, which come first
    # With fewer rows than replicas, those without rows have a placeholder of one row.
    return tf.where(size == 0, replica, replica * size + tf.minimum(replica, longer))


def all_gather(value: Any, axis: int = 0) -> Any:
    """Returns what all replicas have, joined along an axis in their order, the same on each.

    ``value`` is a tensor, or a structure of tensors, of one shape but for the axis. The gradient is
    the sum of all replicas': of a loss that each of N replicas works out of the whole gathered
    batch, return the N-th part from ``grad_pre``, or the loss of the replica's own examples.
    """
    # A tensor straight out of a batch has no device, and TensorFlow needs one. On a single replica,
    # too, the op shows that values are exchanged here: see model/loss_calls.py.
    value = tf.nest.map_structure(tf.identity, value)
    context = _find_others()  # no walrus: AutoGraph converts this function, and knows none
    if context is None:
        return value
    return tf.nest.map_structure(lambda tensor: context.all_gather(tensor, axis), value)


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
