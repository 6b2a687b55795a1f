"""Exchanges between the replicas of a run, for hooks of the graph and for layers.

Replicas exchange values across processes just as across devices, and gradients flow through. On a
single replica, each function returns its argument. A replica that has no rows of a batch computes
on a placeholder batch, which counts in no exchange: see cluster/replica_contexts.py.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ctl_core.types import Count, PerReplica, Structure

# The number of logical replicas of the run that is built or trained; None without the setting.
_logical_replicas: int | None = None


class _Thread(threading.local):
    """The state of a thread: each replica is traced in its own."""

    find_offset: Callable[[], tf.Tensor] | None = None


_thread = _Thread()


def distribute(strategy: tf.distribute.Strategy, values: list[Any]) -> PerReplica:
    """Hands the i-th value to the i-th replica of this process."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group % len(values)]
    )


def count_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Counts the replicas of this process; every process of a cluster has as many."""
    return len(strategy.extended.worker_devices)


def has_peers(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if there are replicas in other processes."""
    return strategy.num_replicas_in_sync > count_local_replicas(strategy)  # type: ignore[no-any-return]


def _find_shared_context() -> tf.distribute.ReplicaContext | None:
    """Returns the context of this replica, or None if it is the only one."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context


@contextlib.contextmanager
def count_logical_replicas(replicas: int | None) -> Iterator[None]:
    """Temporarily makes ``num_replicas`` return a number of logical replicas, in every thread.

    Args:
        replicas: the number; None: replicas are those of ``tf.distribute``
    """
    global _logical_replicas
    before = _logical_replicas
    _logical_replicas = replicas
    try:
        yield
    finally:
        _logical_replicas = before


def num_replicas() -> int:
    """Returns the number of replicas, over all processes; with logical replicas that of these."""
    if _logical_replicas is not None:
        return _logical_replicas
    context = tf.distribute.get_replica_context() or tf.distribute.get_strategy()
    return context.num_replicas_in_sync  # type: ignore[no-any-return]


def replica_id() -> int | tf.Tensor:
    """Returns this replica's number, from 0: an int where it is fixed, otherwise a tensor."""
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


def all_gather(value: Structure, axis: int = 0) -> Structure:
    """Returns the values of all replicas, concatenated along an axis in the replicas' order.

    Every replica gets the same result. The gradient is the sum over all replicas: if each of N
    replicas computes the same loss from the whole gathered batch, return a N-th of it from
    ``grad_pre``, or the loss of the replica's own examples.

    Args:
        value: a tensor or a structure of tensors, whose shapes may differ only in the axis
        axis: the axis along which the values are concatenated
    """
    # A tensor straight out of a batch has no device, and TensorFlow needs one. On a single replica,
    # too, the op shows that values are exchanged here: see model/loss_calls.py.
    value = tf.nest.map_structure(tf.identity, value)
    context = _find_shared_context()  # no walrus: AutoGraph converts this function, and knows none
    if context is None:
        return value
    return tf.nest.map_structure(lambda tensor: context.all_gather(tensor, axis), value)


def all_reduce(value: Structure, op: str = "sum") -> Structure:
    """Returns the sum or the mean of floating-point tensors over all replicas.

    Args:
        value: a tensor or a structure of tensors
        op: "sum", or "mean", which weights each replica by its number of rows of the batch
    """
    reduce_op = tf.distribute.ReduceOp[op.upper()]
    value = tf.nest.map_structure(tf.identity, value)
    context = _find_shared_context()
    if context is None:
        return value
    return context.all_reduce(reduce_op, value)
