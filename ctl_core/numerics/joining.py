"""Values of replicas, micro-batches or whole batches, put behind one another.

Their first dimension is the batch's. Where the others differ, as in sequences of varying length,
a graph cannot go on; a host hook gets a ragged tensor, and a file of predictions is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def joined(values: Sequence[Any], where: str = "") -> Any:
    """Puts values one behind the other along the batch axis; scalars become a vector.

    Args:
        values: tensors, dense, sparse or ragged, or ``tf.IndexedSlices``
        where: in a graph, what to say where dense ones turn out not to fit
    """
    first = values[0]
    if isinstance(first, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([value.values for value in values], 0),
            tf.concat([value.indices for value in values], 0),
            first.dense_shape,
        )
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.concat(0, list(values), expand_nonconcat_dims=True)
    if first.shape.rank == 0:
        return tf.stack(values)
    if len(values) == 1:
        return first
    checks = []
    if where and isinstance(first, tf.Tensor) and not first.shape[1:].is_fully_defined():
        checks = [
            tf.debugging.assert_equal(tf.shape(value)[1:], tf.shape(first)[1:], where)
            for value in values[1:]
        ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.concat(values, 0)


def for_host(values: Sequence[Any]) -> Any:
    """Joins eager values, also such as do not fit.

    Returns:
        What ``joined`` does if all dimensions but the first agree; a ``tf.RaggedTensor`` if they
        differ; the list of values if not even their number does.
    """
    if _fit(values):
        return joined(values)
    shapes = [value.shape for value in values]
    if len({shape.rank for shape in shapes}) > 1:
        return list(values)
    last = max(varying_axes(shapes))
    return tf.concat([tf.RaggedTensor.from_tensor(value, ragged_rank=last) for value in values], 0)


def all_for_host(pieces: dict[str, list[Any]]) -> dict[str, Any]:
    """Joins what each name has, a list of structures, as ``for_host`` does."""
    return {
        name: tf.nest.map_structure(lambda *parts: for_host(parts), *several)
        for name, several in pieces.items()
    }


def _fit(values: Sequence[Any]) -> bool:
    """Whether dense values agree in all dimensions but the first; others always can be joined."""
    first = values[0]
    return not isinstance(first, tf.Tensor) or all(v.shape[1:] == first.shape[1:] for v in values)


def varying_axes(shapes: Sequence[Any]) -> list[int]:
    """Returns the axes, but for the first, in which shapes of one rank differ."""
    sizes = [set(axis) for axis in zip(*(tuple(shape) for shape in shapes), strict=True)]
    return [axis for axis, several in enumerate(sizes) if axis and len(several) > 1]
