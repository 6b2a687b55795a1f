"""What replicas exchange in a hook of the graph, or in a layer; alone, everything stays as it is.

Between processes as between devices; gradients go through both exchanges. In an evaluation the
last batches may be smaller, and what is exchanged is of true examples only.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ctl_core.compat import in_layer_call


def num_replicas() -> int:
    """Returns how many replicas there are, over all processes."""
    context = _context() or tf.distribute.get_strategy()
    return context.num_replicas_in_sync  # type: ignore[no-any-return]


def replica_id() -> Any:
    """Returns this replica's number, from 0: a number where it is fixed, otherwise a tensor."""
    context = _context()
    return 0 if context is None else context.replica_id_in_sync_group


def all_gather(value: Any, axis: int = 0) -> Any:
    """Returns what all replicas have, one behind the other in their order.

    Args:
        value: a tensor, or a structure of tensors, of one shape but for ``axis``
        axis: along which they are joined

    Returns:
        The same on every replica. Its gradient is the sum of all replicas': of a loss that each of
        N replicas works out of the whole gathered batch, return the N-th part from ``grad_pre``, or
        the loss of the replica's own examples.
    """
    context = _context()
    if context is None or context.num_replicas_in_sync == 1:
        return value
    return tf.nest.map_structure(lambda part: context.all_gather(part, axis), value)


def all_reduce(value: Any, op: str = "sum") -> Any:
    """Returns the sum, or the mean, over all replicas.

    Args:
        value: a tensor of floating-point numbers, or a structure of such
        op: "sum" or "mean"

    Raises:
        ValueError: ``op`` is neither.
    """
    if op not in ("sum", "mean"):
        raise ValueError(f"expected the op 'sum' or 'mean', got {op!r}")
    context = _context()
    if context is None or context.num_replicas_in_sync == 1:
        return value
    return context.all_reduce(tf.distribute.ReduceOp[op.upper()], value)


def _context() -> tf.distribute.ReplicaContext | None:
    """Returns the context of the replica that is being traced.

    None, in which nothing is exchanged, where create_model calls a layer: for its shapes, as
    Keras' functional models are made, or on a sample, which makes its variables.

    Raises:
        ValueError: there is none.
    """
    context = tf.distribute.get_replica_context()
    if context is None and not in_layer_call():
        raise ValueError(
            "replicas exchange values in hooks of the graph, in a layer's call and in the loss "
            "only, not where all of them are handled at once"
        )
    return context
