"""Sums over the replicas, of dense and of sparse gradients. In a replica context, in a graph."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class Merged(tf.IndexedSlices):  # type: ignore[misc]
    """A sparse gradient that has each index once; ``parts`` is the one that may have it often."""

    def __init__(self, values: Any, indices: Any, parts: tf.IndexedSlices) -> None:
        super().__init__(values, indices, parts.dense_shape)
        self.parts = parts


def for_optimizer(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Returns what an optimizer is given: rows as they came, where it does nothing but add them up.

    Sums of rows that nobody looks at are then not computed: TensorFlow leaves them out.
    """
    limits = ("momentum", "clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps")
    adds_up = type(optimizer) is keras.optimizers.SGD
    if not adds_up or any(getattr(optimizer, name) for name in limits):
        return gradients
    return [one.parts if isinstance(one, Merged) else one for one in gradients]


def sum_over_replicas(values: Any, replicas: int, compiled: bool = False) -> Any:
    """Sums what each replica has, all of it in one all-reduce.

    Args:
        values: a structure of tensors, dense or sparse
        replicas: how many there are
        compiled: whether this is part of an XLA executable

    Returns:
        The sums. A sparse one has each index once: until then its norm is not the gradient's norm,
        and clipping would depend on how often an index occurs. In an executable, whose sizes are
        fixed, rows of 0 follow, of an index beyond the last, which is left out wherever it is used.
    """
    if replicas > 1 and tf.nest.flatten(values):  # none of a turn whose variables are frozen
        context = tf.distribute.get_replica_context()
        if isinstance(context.strategy, tf.distribute.MultiWorkerMirroredStrategy):
            values = tf.nest.map_structure(_of_fixed_shape, values)
        values = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
    return tf.nest.map_structure(_merge_in_place if compiled else _merge_rows, values)


def divide(value: Any, weight: tf.Tensor) -> Any:
    """Divides a tensor, dense or sparse, by a number; 0 if that is 0."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(divide(value.values, weight), value.indices, value.dense_shape)
    return tf.math.divide_no_nan(value, tf.cast(weight, value.dtype))


def _of_fixed_shape(gradient: Any) -> Any:
    """Returns a sparse gradient as a dense one, if the number of its rows may change.

    Between processes, sparse gradients are gathered, and the collective of a graph takes no other
    shape than that of its first step.
    """
    sparse = isinstance(gradient, tf.IndexedSlices)
    return (
        tf.convert_to_tensor(gradient) if sparse and gradient.values.shape[0] is None else gradient
    )


def _merge_rows(gradient: Any) -> Any:
    """Adds up the rows of a sparse gradient that belong to one index."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, rows = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, rows, tf.size(indices))
    return Merged(values, indices, gradient)


def _merge_in_place(gradient: Any) -> Any:
    """Does the same with sizes that stay: each row is added to the first one of its index."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.get_static_value(gradient.dense_shape)
    number = gradient.values.shape[0]
    if shape is None or number is None:
        return _merge_rows(gradient)
    end, places = tf.cast(shape[0], gradient.indices.dtype), tf.range(number)
    first = tf.tensor_scatter_nd_min(tf.fill([shape[0]], number), gradient.indices[:, None], places)
    rows = tf.gather(first, gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, rows, number)
    indices = tf.where(rows == places, gradient.indices, end)
    return Merged(values, indices, gradient)
