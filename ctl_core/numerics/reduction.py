"""Values brought together: replicas' are summed, micro-batches' are summed or joined."""

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

PIECES = ("output", "batch")  # what hooks are given of each replica and micro-batch


def sum_over_replicas(values: Any, replicas: int, compiled: bool) -> Any:
    """Sums a structure of tensors over the replicas, in one all-reduce; in a replica context.

    A sparse sum has each index once: until then its norm is not the gradient's norm, and clipping
    would depend on how often an index occurs. Where sizes are fixed, as in what is ``compiled``,
    rows of 0 follow, of an index beyond the last, which is left out wherever it is used.
    """
    if replicas > 1 and tf.nest.flatten(values):  # none of a turn whose variables are frozen
        context = tf.distribute.get_replica_context()
        if isinstance(context.strategy, tf.distribute.MultiWorkerMirroredStrategy):
            values = tf.nest.map_structure(_fix_shape, values)
        values = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
    return tf.nest.map_structure(partial(_merge_rows, compiled), values)


def _fix_shape(value: Any) -> Any:
    """Makes a sparse gradient of a varying number of rows dense: collectives keep a shape."""
    varies = isinstance(value, tf.IndexedSlices) and value.values.shape[0] is None
    return tf.convert_to_tensor(value) if varies else value


def _merge_rows(compiled: bool, gradient: Any) -> Any:
    """Adds up the rows of a sparse gradient that belong to one index."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices = gradient.indices
    if compiled:  # XLA's own tf.unique takes several times a step's time
        places, shape = tf.range(tf.size(indices)), tf.get_static_value(gradient.dense_shape)
        firsts = tf.fill(shape[:1], tf.size(indices))
        rows = tf.gather(tf.tensor_scatter_nd_min(firsts, indices[:, None], places), indices)
        found = tf.where(rows == places, indices, tf.cast(shape[0], indices.dtype))
        values = tf.math.unsorted_segment_sum(gradient.values, rows, tf.size(indices))
    else:  # in their order: on a GPU, others take rows as they come, and replicas would drift apart
        found, rows = tf.unique(indices)
        order = tf.argsort(rows, stable=True)
        ordered = tf.gather(rows, order)
        values = tf.sparse.segment_sum(gradient.values, order, ordered, tf.size(found))
    return tf.IndexedSlices(values, found, gradient.dense_shape)


def multiply(values: Any, factor: tf.Tensor) -> Any:
    """Multiplies the tensors of a structure, dense or sparse, by a number."""
    return tf.nest.map_structure(
        lambda value: tf.math.scalar_mul(tf.cast(factor, value.dtype), value), values
    )


def accumulate(run: Callable[..., Any], steps: int, contribute: Callable[[Any], Any]) -> Any:
    """Adds up the contributions of A micro-batches, on each replica's own device.

    A micro-batch starts when the gradients of the one before it are there, so that only one takes
    memory at a time; written out one behind the other, TensorFlow would run them side by side.

    Args:
        run: calls a function on each replica, with its own values
        steps: A
        contribute: returns what replicas make of the micro-batch of an index, ``forward_backward``

    Returns:
        A contribution with a value per replica: losses, weights and dense gradients added up; the
        rows of sparse gradients one behind the other; outputs and batches as lists.
    """
    if steps == 1:
        return contribute(0)

    # Totals have for each tensor of a contribution its sum, or an array of A entries.
    def begin(one: dict[str, Any]) -> list[Any]:
        return [
            tf.TensorArray(tensor.dtype, steps, infer_shape=False).write(0, tensor)
            if is_listed
            else tensor
            for tensor, is_listed in zip(_flatten(one), _are_listed(one), strict=True)
        ]

    def add(totals: list[Any], one: dict[str, Any], index: tf.Tensor) -> list[Any]:
        return [
            total.write(index, tensor)
            if isinstance(total, tf.TensorArray)
            else tf.ensure_shape(total + tensor, total.shape)
            for total, tensor in zip(totals, _flatten(one), strict=True)
        ]

    def end(totals: list[Any], first: dict[str, Any]) -> dict[str, Any]:
        several = []
        for index in range(steps):
            tensors = [
                tf.identity(total)  # the loop's result names no device to reduce to
                if not isinstance(total, tf.TensorArray)
                else tensor  # the shape of a sparse gradient, which XLA has to know
                if tf.get_static_value(tensor) is not None
                else tf.ensure_shape(total.read(index), tensor.shape)
                for total, tensor in zip(totals, _flatten(first), strict=True)
            ]
            several.append(tf.nest.pack_sequence_as(first, tensors, expand_composites=True))
        pieces = {name: [one[name][0] for one in several] for name in PIECES if name in first}
        return {**tf.nest.map_structure(_unite, *several), **pieces}

    def body(done: tf.Tensor, totals: list[Any]) -> tuple[tf.Tensor, list[Any]]:
        return done + 1, run(add, totals, contribute(done), done)

    # No constant, or its static shape would be asked of micro-batches that have a row less.
    first = contribute(tf.compat.v1.placeholder_with_default(0, []))
    totals = run(begin, first)
    with tf.control_dependencies(_flatten(first["gradients"])):
        _, totals = tf.while_loop(
            lambda done, _: done < steps, body, (tf.constant(1), totals), parallel_iterations=1
        )
    return run(end, totals, first)


def _flatten(structure: Any) -> list[tf.Tensor]:
    """Returns all tensors: several of what is ragged or sparse."""
    return tf.nest.flatten(structure, expand_composites=True)  # type: ignore[no-any-return]


def _are_listed(one: dict[str, Any]) -> list[bool]:
    """Returns for each tensor of a contribution whether those of micro-batches are not added up."""
    return [
        name in PIECES or isinstance(part, tf.IndexedSlices)
        for name in sorted(one)  # the order of tf.nest
        for part in tf.nest.flatten(one[name])
        for _ in _flatten(part)
    ]


def _unite(*parts: Any) -> Any:
    """Returns a sparse gradient of all micro-batches; of what is summed, each has the sum."""
    return join(*parts) if isinstance(parts[0], tf.IndexedSlices) else parts[0]


def join(*values: Any) -> Any:
    """Puts tensors, dense or sparse, one behind the other; scalars become a vector."""
    first = values[0]
    if isinstance(first, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([value.values for value in values], 0),
            tf.concat([value.indices for value in values], 0),
            first.dense_shape,
        )
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.concat(0, list(values), expand_nonconcat_dims=True)
    return tf.stack(values) if first.shape.rank == 0 else tf.concat(values, 0)


def join_for_host(*values: Any) -> Any:
    """Joins eager tensors; dense ones that differ in more than the first axis become ragged."""
    if isinstance(values[0], tf.Tensor):
        sizes = map(set, zip(*(tuple(value.shape) for value in values), strict=True))
        if varying := [axis for axis, several in enumerate(sizes) if axis and len(several) > 1]:
            ragged = tf.RaggedTensor.from_tensor
            return join(*(ragged(value, ragged_rank=varying[-1]) for value in values))
    return join(*values)
