"""Values brought together: those of replicas are summed, those of micro-batches summed or joined.

All but ``join_for_host`` runs while a graph is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl_core.cluster.collectives import distribute

PIECES = ("output", "batch")  # what hooks are given of each replica and micro-batch

# ---- Of replicas ---------------------------------------------------------------------------------


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
    """Sums what each replica has, all of it in one all-reduce; in a replica context.

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
            values = tf.nest.map_structure(_fix_shape, values)
        values = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
    return tf.nest.map_structure(lambda value: _merge_rows(value, compiled), values)


def _fix_shape(value: Any) -> Any:
    """Returns a sparse gradient as a dense one, if the number of its rows may change.

    Between processes, sparse gradients are gathered, and the collective of a graph takes no other
    shape than that of its first step.
    """
    varies = isinstance(value, tf.IndexedSlices) and value.values.shape[0] is None
    return tf.convert_to_tensor(value) if varies else value


def _merge_rows(gradient: Any, compiled: bool) -> Any:
    """Adds up the rows of a sparse gradient that belong to one index."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape, number = tf.get_static_value(gradient.dense_shape), gradient.values.shape[0]
    if not compiled or shape is None or number is None:
        indices, rows = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, rows, tf.size(indices))
        return Merged(values, indices, gradient)
    # Sizes stay: each row is added to the first one of its index.
    end, places = tf.cast(shape[0], gradient.indices.dtype), tf.range(number)
    first = tf.tensor_scatter_nd_min(tf.fill([shape[0]], number), gradient.indices[:, None], places)
    rows = tf.gather(first, gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, rows, number)
    return Merged(values, tf.where(rows == places, gradient.indices, end), gradient)


def divide(value: Any, weight: tf.Tensor) -> Any:
    """Divides a tensor, dense or sparse, by a number; 0 if that is 0."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(divide(value.values, weight), value.indices, value.dense_shape)
    return tf.math.divide_no_nan(value, tf.cast(weight, value.dtype))


# ---- Of micro-batches ----------------------------------------------------------------------------


def accumulate(
    strategy: tf.distribute.Strategy, steps: int, contribute: Callable[[Any], Any]
) -> tuple[Any, dict[str, list[Any]]]:
    """Adds up the contributions of A micro-batches, on each replica's own device.

    A micro-batch starts when the gradients of the one before it are there, so that only one takes
    memory at a time; written out one behind the other, TensorFlow would run them side by side.

    Args:
        strategy: of the replicas
        steps: A
        contribute: draws the micro-batch of an index for each replica, and returns what
            ``forward_backward`` makes of it

    Returns:
        A contribution with a value per replica: losses, weights and dense gradients added up; the
        rows of sparse gradients, outputs and batches one behind the other. And outputs and batches
        by name, as a list of such values by micro-batch.
    """
    if steps == 1:
        only = contribute(0)
        return only, {name: [only[name]] for name in PIECES if name in only}

    def on_each(function: Callable[..., Any], *values: Sequence[Any]) -> list[Any]:
        results = []
        for device, *own in zip(strategy.extended.worker_devices, *values, strict=True):
            with tf.device(device):
                results.append(function(*own))
        return results

    # A total has for each tensor of a contribution its sum, or an array of A entries.
    def start(one: dict[str, Any]) -> list[Any]:
        def begin(tensor: tf.Tensor, summed: bool) -> Any:
            if summed:
                return tensor
            return tf.TensorArray(tensor.dtype, steps, infer_shape=False).write(0, tensor)

        return [begin(*pair) for pair in zip(_flatten(one), _are_summed(one), strict=True)]

    def add(totals: list[Any], one: dict[str, Any], index: tf.Tensor) -> list[Any]:
        return [
            total.write(index, tensor)
            if isinstance(total, tf.TensorArray)
            else tf.ensure_shape(total + tensor, total.shape)
            for total, tensor in zip(totals, _flatten(one), strict=True)
        ]

    def end(totals: list[Any], one: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns a contribution by micro-batch, each with the sums."""

        def read(total: Any, tensor: tf.Tensor, index: int) -> tf.Tensor:
            if isinstance(total, tf.TensorArray):
                return tf.ensure_shape(total.read(index), tensor.shape)
            return tf.identity(total)  # the loop's result names no device to reduce to

        pairs = list(zip(totals, _flatten(one), strict=True))
        return [
            tf.nest.pack_sequence_as(one, [read(*p, index) for p in pairs], expand_composites=True)
            for index in range(steps)
        ]

    def body(done: tf.Tensor, totals: list[Any]) -> tuple[tf.Tensor, list[Any]]:
        found = strategy.experimental_local_results(contribute(done))
        return done + 1, on_each(lambda total, one: add(total, one, done), totals, found)

    first = strategy.experimental_local_results(contribute(0))
    totals = on_each(start, first)
    with tf.control_dependencies(_flatten([one["gradients"] for one in first])):
        _, totals = tf.while_loop(
            lambda done, _: done < steps, body, (tf.constant(1), totals), parallel_iterations=1
        )
    by_replica = on_each(end, totals, first)
    pieces = {
        name: [
            distribute(strategy, [several[index][name] for several in by_replica])
            for index in range(steps)
        ]
        for name in PIECES
        if name in first[0]
    }
    return distribute(strategy, on_each(_unite, by_replica)), pieces


def _flatten(structure: Any) -> list[tf.Tensor]:
    """Returns all tensors: several of what is ragged or sparse."""
    return tf.nest.flatten(structure, expand_composites=True)  # type: ignore[no-any-return]


def _are_summed(one: dict[str, Any]) -> list[bool]:
    """Returns whether micro-batches are added up, for each tensor of a contribution."""
    return [
        name not in PIECES and not isinstance(part, tf.IndexedSlices)
        for name in sorted(one)  # the order of tf.nest
        for part in tf.nest.flatten(one[name])
        for _ in _flatten(part)
    ]


def _unite(several: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the contribution of all micro-batches of a replica, each of which has the sums."""

    def unite(name: str, *parts: Any) -> Any:
        behind = name in PIECES or isinstance(parts[0], tf.IndexedSlices)
        return join(parts) if behind else parts[0]

    return {
        name: tf.nest.map_structure(
            lambda *parts, name=name: unite(name, *parts), *(one[name] for one in several)
        )
        for name in several[0]
    }


# ---- Behind one another --------------------------------------------------------------------------


def join(values: Sequence[Any]) -> Any:
    """Puts tensors, dense or sparse, one behind the other along the batch axis.

    Scalars become a vector.
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
    return tf.stack(values) if first.shape.rank == 0 else tf.concat(values, 0)


def join_for_host(values: Sequence[Any]) -> Any:
    """Joins eager tensors; dense ones that differ in more than the first axis become ragged."""
    first = values[0]
    if isinstance(first, tf.Tensor) and (varying := find_varying_axes(v.shape for v in values)):
        last = max(varying)
        values = [tf.RaggedTensor.from_tensor(value, ragged_rank=last) for value in values]
    return join(values)


def find_varying_axes(shapes: Iterable[Any]) -> list[int]:
    """Returns the axes, but for the first, in which shapes of one rank differ."""
    sizes = [set(axis) for axis in zip(*(tuple(shape) for shape in shapes), strict=True)]
    return [axis for axis, several in enumerate(sizes) if axis and len(several) > 1]
