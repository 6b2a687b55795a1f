"""Sums over replicas, and sums or lists of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from ctl_core.types import (
    AnyTensor,
    Batch,
    Count,
    Gradient,
    GradientsByObjective,
    ModelOutput,
    Structure,
    VariablesByObjective,
)

# The fields of a contribution that hooks are passed separately for each replica and micro-batch.
PIECES = ("output", "batch")


class Contribution(NamedTuple):
    """The contribution of one replica, or of one of its micro-batches, to an update.

    Attributes:
        loss: the objectives by name, scalars
        gradients: the gradients by objective; with a loss scale, those of the scaled objectives
        weight: the weight of the batch divided by the global batch size, a list of one scalar;
            empty without ``batch_weight``
        output: the model's output, a list of one entry; empty if nobody asks for it
        batch: the batch, likewise
    """

    loss: dict[str, tf.Tensor]
    gradients: GradientsByObjective
    weight: list[tf.Tensor]
    output: list[ModelOutput]
    batch: list[Batch]


def sum_over_replicas(values: Structure, replicas: int) -> Structure:
    """Sums a structure of tensors over the replicas, in one all-reduce; in a replica context.

    The sum of a sparse tensor has the rows of all replicas, see ``merge_rows``.

    Args:
        values: the structure; it has no tensors if all variables of a turn are frozen
        replicas: the number of replicas of all processes
    """
    if replicas == 1 or not tf.nest.flatten(values):
        return values
    context = tf.distribute.get_replica_context()
    if isinstance(context.strategy, tf.distribute.MultiWorkerMirroredStrategy):
        values = tf.nest.map_structure(_fix_shape, values)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, values)


def merge_rows(values: Structure, compiled: bool) -> Structure:
    """Adds up the rows of sparse gradients that belong to the same index; dense ones stay.

    Otherwise the norm of a sparse gradient would not be the norm of the gradient, and clipping
    would depend on how often an index occurs.

    Args:
        values: a structure of gradients
        compiled: whether sizes have to be fixed, as XLA needs them. A sparse sum then ends with
            rows of 0 for an index beyond the last one, which every use leaves out.
    """
    return tf.nest.map_structure(partial(_merge_rows, compiled), values)


def _fix_shape(value: Gradient) -> Gradient:
    """Makes a sparse gradient with a varying number of rows dense, as collectives need it."""
    if isinstance(value, tf.IndexedSlices) and value.values.shape[0] is None:
        return tf.convert_to_tensor(value)
    return value


def _merge_rows(compiled: bool, gradient: Gradient) -> Gradient:
    """Adds up the rows of a sparse gradient that belong to the same index, in their order.

    The order matters: replicas whose sums are rounded in different ways would drift apart.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if compiled:
        return _merge_rows_in_place(gradient)
    unique, rows = tf.unique(gradient.indices)
    if tf.config.list_logical_devices("GPU"):  # there, an unsorted sum takes rows in any order
        order = tf.argsort(rows, stable=True)
        ordered = tf.gather(rows, order)
        values = tf.sparse.segment_sum(gradient.values, order, ordered, tf.size(unique))
    else:
        values = tf.math.unsorted_segment_sum(gradient.values, rows, tf.size(unique))
    return tf.IndexedSlices(values, unique, gradient.dense_shape)


def _merge_rows_in_place(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the rows of an index in its first row, and gives the other rows an unused index.

    XLA's own ``tf.unique`` takes several times as long as a step.
    """
    indices = gradient.indices
    places = tf.range(tf.size(indices))
    shape = tf.get_static_value(gradient.dense_shape)
    beyond_last = tf.fill(shape[:1], tf.size(indices))
    first_places = tf.tensor_scatter_nd_min(beyond_last, indices[:, None], places)
    rows = tf.gather(first_places, indices)
    unique = tf.where(rows == places, indices, tf.cast(shape[0], indices.dtype))
    values = tf.math.unsorted_segment_sum(gradient.values, rows, tf.size(indices))
    return tf.IndexedSlices(values, unique, gradient.dense_shape)


def encode_for_sum(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor of any dtype but string as float32, float64 or int64, without loss.

    These are the dtypes that every all-reduce can sum. NCCL has no bool, complex numbers or small
    integers, and TensorFlow sums int32 on the host, and nothing else together with it. The real and
    the imaginary part of a complex number are in a new last axis.
    """
    dtype = value.dtype
    if dtype.is_complex:
        return tf.stack([tf.math.real(value), tf.math.imag(value)], axis=-1)
    if dtype == tf.uint64:  # its largest numbers do not exist in int64
        return tf.bitcast(value, tf.int64)
    if dtype.is_bool or dtype.is_integer:
        return tf.cast(value, tf.int64)
    if dtype == tf.float64:
        return value
    return tf.cast(value, tf.float32)


def decode_sum(encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the tensor of a dtype that ``encode_for_sum`` encoded."""
    if dtype.is_complex:
        return tf.complex(encoded[..., 0], encoded[..., 1])
    if dtype == tf.uint64:
        return tf.bitcast(encoded, tf.uint64)
    return tf.cast(encoded, dtype)


def multiply(values: Structure, factor: tf.Tensor) -> Structure:
    """Multiplies the tensors of a structure, dense or sparse, by a number."""
    return tf.nest.map_structure(
        lambda value: tf.math.scalar_mul(tf.cast(factor, value.dtype), value), values
    )


def accumulate(
    run: Callable[..., Any],
    micro_batches: int,
    contribute: Callable[[Count], tuple[Contribution, VariablesByObjective]],
) -> tuple[Contribution, VariablesByObjective]:
    """Adds up the contributions of micro-batches, on each replica's own device.

    A micro-batch starts when the gradients of the one before it exist, so that the activations of
    only one take memory at a time. (Written one after another, TensorFlow would run them side by
    side.)

    Args:
        run: calls a function on each replica, with that replica's values
        micro_batches: how many there are, at least 2
        contribute: returns the contribution of the micro-batch of an index, a scalar int32 tensor,
            and the variables of its gradients, which are the same for all micro-batches

    Returns:
        A contribution with a value for each replica: losses, weights and dense gradients are added
        up, the rows of sparse gradients are concatenated, outputs and batches are lists. And the
        variables of the gradients.
    """
    accumulator = MicroBatchAccumulator(micro_batches)
    # If the first index were a constant, the static shape of its micro-batch would be required of
    # the others, which may have a row less.
    first, variables = contribute(tf.compat.v1.placeholder_with_default(0, []))
    totals = run(accumulator.begin, first)

    def add_next(index: tf.Tensor, totals: list[Any]) -> tuple[tf.Tensor, list[Any]]:
        contribution, _ = contribute(index)
        return index + 1, run(accumulator.add, totals, contribution, index)

    with tf.control_dependencies(_flatten(first.gradients)):
        _, totals = tf.while_loop(
            lambda index, _: index < micro_batches,
            add_next,
            (tf.constant(1), totals),
            parallel_iterations=1,
        )
    return run(accumulator.finish, totals, first), variables


class MicroBatchAccumulator:
    """Adds up the contributions of one replica's micro-batches.

    The totals are a flat list, as a loop of the graph needs it. For each tensor of a contribution
    it has the sum so far, or a TensorArray with an entry for each micro-batch.
    """

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches

    def begin(self, contribution: Contribution) -> list[tf.Tensor | tf.TensorArray]:
        """Returns the totals after the first micro-batch."""
        totals = []
        for tensor, is_listed in self._label_tensors(contribution):
            if is_listed:
                array = tf.TensorArray(tensor.dtype, self._micro_batches, infer_shape=False)
                totals.append(array.write(0, tensor))
            else:
                totals.append(tensor)
        return totals

    def add(
        self, totals: list[tf.Tensor | tf.TensorArray], contribution: Contribution, index: tf.Tensor
    ) -> list[tf.Tensor | tf.TensorArray]:
        """Returns the totals after the micro-batch of an index, a scalar int32 tensor."""
        updated = []
        for total, tensor in zip(totals, _flatten(contribution), strict=True):
            if isinstance(total, tf.TensorArray):
                updated.append(total.write(index, tensor))
            else:
                updated.append(tf.ensure_shape(total + tensor, total.shape))
        return updated

    def finish(self, totals: list[Any], first: Contribution) -> Contribution:
        """Returns the sum of all contributions; ``first``, one of them, tells the structure."""
        by_index = [self._read(totals, first, index) for index in range(self._micro_batches)]
        summed = tf.nest.map_structure(_join_sparse, *by_index)
        return summed._replace(
            output=[contribution.output[0] for contribution in by_index if contribution.output],
            batch=[contribution.batch[0] for contribution in by_index if contribution.batch],
        )

    def _read(self, totals: list[Any], first: Contribution, index: int) -> Contribution:
        """Returns a contribution with the sums, and with the entries of one micro-batch."""
        tensors = []
        for total, tensor in zip(totals, _flatten(first), strict=True):
            if not isinstance(total, tf.TensorArray):
                # The result of a loop has no device, and a reduction needs one.
                tensors.append(tf.identity(total))
            elif tf.get_static_value(tensor) is not None:
                # The shape of a sparse gradient: XLA has to know it.
                tensors.append(tensor)
            else:
                tensors.append(tf.ensure_shape(total.read(index), tensor.shape))
        return tf.nest.pack_sequence_as(  # type: ignore[no-any-return]
            first, tensors, expand_composites=True
        )

    def _label_tensors(self, contribution: Contribution) -> Iterator[tuple[tf.Tensor, bool]]:
        """Yields each tensor, and whether those of micro-batches are listed, not added up."""
        for name, field in contribution._asdict().items():
            for value in tf.nest.flatten(field):
                is_listed = name in PIECES or isinstance(value, tf.IndexedSlices)
                for tensor in _flatten(value):
                    yield tensor, is_listed


def _flatten(structure: Structure) -> list[tf.Tensor]:
    """Returns all tensors of a structure, including the components of ragged and sparse ones."""
    return tf.nest.flatten(structure, expand_composites=True)  # type: ignore[no-any-return]


def _join_sparse(*values: Gradient) -> Gradient:
    """Concatenates the sparse gradients of micro-batches; anything else is a sum already."""
    if isinstance(values[0], tf.IndexedSlices):
        return join(*values)
    return values[0]


def join_pieces(pieces: list[Structure]) -> Structure:
    """Joins the outputs, or the batches, of a replica's micro-batches."""
    if len(pieces) == 1:
        return pieces[0]
    return tf.nest.map_structure(join, *pieces)


def join(*values: AnyTensor | Gradient) -> AnyTensor | Gradient:
    """Concatenates tensors, dense or sparse, along the first axis; scalars become a vector."""
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
    return tf.concat(values, 0)


def join_for_host(*values: AnyTensor) -> AnyTensor:
    """Joins eager tensors; dense ones that differ in more than the first axis become ragged."""
    if not isinstance(values[0], tf.Tensor):
        return join(*values)
    sizes_by_axis = zip(*(tuple(value.shape) for value in values), strict=True)
    varying_axes = [
        axis for axis, sizes in enumerate(sizes_by_axis) if axis > 0 and len(set(sizes)) > 1
    ]
    if not varying_axes:
        return join(*values)
    ragged_rank = varying_axes[-1]
    return join(*(tf.RaggedTensor.from_tensor(value, ragged_rank=ragged_rank) for value in values))
