"""Exchanges values between the replicas of a run, for graph hooks and layers.

``all_gather`` and ``all_reduce`` work across devices as well as across processes, and gradients
flow through them. On a single replica, they return their argument. If a replica has no rows of a
batch, it computes on a placeholder batch, which these functions ignore: see
cluster/replica_contexts.py. cluster/exchange.py handles the types of the values.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ctl_core.cluster import exchange
from ctl_core.types import Count, PerReplica, Structure

# The number of logical replicas of the current run; None if the run does not use them.
_logical_replicas: int | None = None


class _Thread(threading.local):
    """State that is local to a thread; each replica is traced in a separate thread."""

    find_offset: Callable[[], tf.Tensor] | None = None


_thread = _Thread()


def distribute(strategy: tf.distribute.Strategy, values: list[Any]) -> PerReplica:
    """Returns a per-replica value with the i-th value on the i-th replica of this process."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group % len(values)]
    )


def count_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of replicas per process, which is the same in all processes."""
    return len(strategy.extended.worker_devices)


def has_peers(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if there are replicas in other processes."""
    return strategy.num_replicas_in_sync > count_local_replicas(strategy)


def _find_shared_context() -> tf.distribute.ReplicaContext | None:
    """Returns the context of this replica, or None if there is only one replica."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context


@contextlib.contextmanager
def count_logical_replicas(replicas: int | None) -> Iterator[None]:
    """Temporarily makes ``num_replicas`` return a number of logical replicas, in every thread.

    Args:
        replicas: the number of logical replicas; None makes ``num_replicas`` return the number of
            replicas of ``tf.distribute``
    """
    global _logical_replicas
    before = _logical_replicas
    _logical_replicas = replicas
    try:
        yield
    finally:
        _logical_replicas = before


def num_replicas() -> int:
    """Returns the number of replicas in all processes.

    With ``logical_replicas``, returns the number of logical replicas.
    """
    if _logical_replicas is not None:
        return _logical_replicas
    context = tf.distribute.get_replica_context() or tf.distribute.get_strategy()
    return context.num_replicas_in_sync


def replica_id() -> int | tf.Tensor:
    """Returns the index of this replica, counted from 0.

    Returns:
        An int32 scalar; an int if there is only one replica.
    """
    context = tf.distribute.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


def row_offset() -> tf.Tensor:
    """Returns the index of this replica's first row in the result of ``all_gather``.

    Replicas may have different numbers of rows, so the offset need not be a multiple of
    ``replica_id()``. If a tensor has one row per example, like the tensors of a batch, row ``i`` of
    this replica is row ``ctl.row_offset() + i`` of the gathered tensor.

    Returns:
        An int32 scalar; 0 on one device, and outside of a step or an evaluation.
    """
    find_offset = _thread.find_offset
    if find_offset is None or _find_shared_context() is None:
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


def find_offset_in_share(rows: Count, rows_of_all: Count | None = None) -> tf.Tensor:
    """Computes ``row_offset`` for replicas whose numbers of rows differ by at most one.

    Args:
        rows: the number of rows of this replica
        rows_of_all: the total number of rows of all replicas. None means that every replica has
            ``rows`` rows, or that replica 0 has all rows.
    """
    replica = tf.cast(replica_id(), tf.int32)
    if rows_of_all is None:
        return replica * tf.cast(rows, tf.int32)
    rows_of_all = tf.cast(rows_of_all, tf.int32)
    size = rows_of_all // num_replicas()
    longer = rows_of_all % num_replicas()  # how many of the first replicas have one more row
    # If there are fewer rows than replicas, each replica without rows has one placeholder row.
    return tf.where(size == 0, replica, replica * size + tf.minimum(replica, longer))


def all_gather(value: Structure, axis: int = 0) -> Structure:
    """Returns the values of all replicas, concatenated along an axis in the replicas' order.

    Every replica gets the same result. The gradient is the sum over all replicas. If each of N
    replicas computes the same loss from the whole gathered batch, return this loss divided by N
    from ``grad_pre``, or return only the loss of the replica's own examples.

    Args:
        value: a tensor or a structure of tensors of any dtype, with at least one axis; their shapes
            may differ between replicas, but only along ``axis``. Ragged and sparse tensors are
            concatenated along axis 0.
        axis: the axis along which the values are concatenated
    """
    # TensorFlow needs tensors with a device, but a tensor taken directly from a batch has none. The
    # identity op also marks the exchange in the graph of a single replica: see model/loss_calls.py.
    value = tf.nest.map_structure(tf.identity, value)
    for leaf in tf.nest.flatten(value):
        exchange.check_gather(leaf, axis)
    # AutoGraph converts this function, and does not support the walrus operator.
    context = _find_shared_context()
    if context is None:
        return value
    return tf.nest.map_structure(lambda leaf: exchange.gather(context, leaf, axis), value)


def all_reduce(value: Structure, op: str = "sum") -> Structure:
    """Returns the sum, the mean, the maximum or the minimum of tensors over all replicas.

    The gradient of a maximum or minimum goes to the replica that has this value. If several
    replicas have it, each of them gets an equal part. A replica without rows is ignored.

    Args:
        value: a tensor or a structure of tensors of numbers, with the same shape on each replica
        op: "sum", "mean", "max" or "min". The mean weights each replica by its number of rows of
            the batch, and requires floating-point or complex numbers. "max" and "min" require real
            numbers.
    """
    operation = str(getattr(op, "value", op)).lower()  # op may be a tf.distribute.ReduceOp
    value = tf.nest.map_structure(tf.identity, value)
    for leaf in tf.nest.flatten(value):
        exchange.check_reduce(leaf, operation)
    context = _find_shared_context()
    if context is None:
        return value
    return exchange.reduce(context, value, operation)
