"""Exchanges between the replicas of a run, for hooks of the graph and for layers.

Replicas exchange values across processes just as across devices, and gradients flow through. On a
single replica, each function returns its argument. A replica that has no rows of a batch computes
on a placeholder batch, which counts in no exchange: see cluster/replica_contexts.py.
"""

from typing import Any

import tensorflow as tf

from ctl_core.types import PerReplica, Structure


def distribute(strategy: tf.distribute.Strategy, values: list[Any]) -> PerReplica:
    """Hands the i-th value to the i-th replica of this process."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group % len(values)]
    )


def count_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Counts the replicas of this process; every process of a cluster has as many."""
    return len(strategy.extended.worker_devices)


def _find_shared_context() -> tf.distribute.ReplicaContext | None:
    """Returns the context of this replica, or None if it is the only one."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context


def num_replicas() -> int:
    """Returns the number of replicas, over all processes."""
    context = tf.distribute.get_replica_context() or tf.distribute.get_strategy()
    return context.num_replicas_in_sync  # type: ignore[no-any-return]


def replica_id() -> int | tf.Tensor:
    """Returns this replica's number, from 0: an int where it is fixed, otherwise a tensor."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


def all_gather(value: Structure, axis: int = 0) -> Structure:
    """Returns the values of all replicas, concatenated along an axis in the replicas' order.

    Every replica gets the same result. The gradient is the sum over all replicas: if each of N
    replicas computes the same loss from the whole gathered batch, return a N-th of it from
    ``grad_pre``, or the loss of the replica's own examples.

    Args:
        value: a tensor or a structure of tensors, whose shapes may differ only in the axis
        axis: the axis along which the values are concatenated
    """
    context = _find_shared_context()  # no walrus: AutoGraph, which converts this, knows none
    if context is None:
        return value
    # A tensor that comes straight out of a batch is on no device; TensorFlow would move the
    # exchange there.
    return tf.nest.map_structure(
        lambda tensor: context.all_gather(tf.identity(tensor), axis), value
    )


def all_reduce(value: Structure, op: str = "sum") -> Structure:
    """Returns the sum or the mean of floating-point tensors over all replicas.

    Args:
        value: a tensor or a structure of tensors
        op: "sum", or "mean", which weights each replica by its number of rows of the batch
    """
    reduce_op = tf.distribute.ReduceOp[op.upper()]
    context = _find_shared_context()
    if context is None:
        return value
    return context.all_reduce(reduce_op, tf.nest.map_structure(tf.identity, value))
