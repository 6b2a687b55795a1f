"""What replicas exchange in a hook of the graph, or in a layer; alone, everything stays as it is.

Between processes as between devices; gradients go through both exchanges. A replica that has no
rows of a batch computes on a stand-in, which counts in no exchange.
"""

from typing import Any

import tensorflow as tf


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


def all_gather(value: Any, axis: int = 0) -> Any:
    """Returns what all replicas have, joined along an axis in their order, the same on each.

    ``value`` is a tensor, or a structure of tensors, of one shape but for the axis. The gradient is
    the sum of all replicas': of a loss that each of N replicas works out of the whole gathered
    batch, return the N-th part from ``grad_pre``, or the loss of the replica's own examples.
    """
    context = _find_others()  # no walrus: AutoGraph converts this function, and knows none
    if context is None:
        return value
    # What comes straight out of a batch stands on no device, to which TensorFlow would bring this.
    return tf.nest.map_structure(lambda part: context.all_gather(tf.identity(part), axis), value)


def all_reduce(value: Any, op: str = "sum") -> Any:
    """Returns the "sum", or the "mean", of tensors of floating-point numbers over all replicas.

    A mean weighs each replica by the rows that it has of the batch.
    """
    reduce_op = tf.distribute.ReduceOp[op.upper()]
    context = _find_others()
    if context is None:
        return value
    return context.all_reduce(reduce_op, tf.nest.map_structure(tf.identity, value))
