"""Sums the results of replicas, and combines the results of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from ctl_core.cluster.exchange import decode_sum, encode_for_sum, reduce_by_dtype
from ctl_core.numerics.constants import restore_constants
from ctl_core.numerics.packing import BUCKET_BYTES, GradientPacking
from ctl_core.types import (
    Batch,
    Count,
    Gradient,
    GradientsByObjective,
    ModelOutput,
    Structure,
    VariablesByObjective,
)

# The fields of a contribution that are not added up: each replica and each micro-batch has its own
# value.
PIECES = ("output", "batch")


class Contribution(NamedTuple):
    """The contribution of one replica, or of one of its leaves, to an update.

    The sum of several contributions has the same form.

    Attributes:
        loss: the values of the objectives by name, scalars
        gradients: the gradients by objective; with a loss scale, the gradients of the scaled
            objectives
        weight: a list with one scalar, the weight of the batch divided by the global batch size;
            empty without ``batch_weight``
        output: a list with one entry, the model's output after ``split_constants``; empty if the
            output is not needed
        batch: a list with one entry, the batch; empty if the batch is not needed
        changes: the changes of variables, see ``leaves.find_changes``
        differences: see ``leaves.count_differences``; empty if a replica has only one leaf
    """

    loss: dict[str, tf.Tensor]
    gradients: GradientsByObjective
    weight: list[tf.Tensor]
    output: list[ModelOutput]
    batch: list[Batch]
    changes: list[tf.Tensor]
    differences: list[tf.Tensor]


class PackedContribution(NamedTuple):
    """The contribution of one replica, or of one of its leaves, with its numbers in buckets.

    Attributes:
        buckets: all numbers that are summed over the replicas, see ``ContributionLayout``
        loss: as in ``Contribution``, not summed over the replicas
        output: as in ``Contribution``
        batch: as in ``Contribution``
    """

    buckets: list[Gradient]
    loss: dict[str, tf.Tensor]
    output: list[ModelOutput]
    batch: list[Batch]


class ContributionLayout:
    """The layout of a contribution's numbers in buckets; contains no tensors.

    Attributes:
        variables: the variables of the gradients by objective, in the order of the gradients
        packing: the assignment of the numbers to buckets
    """

    def __init__(
        self, contribution: Contribution, variables: VariablesByObjective, are_exchanged: bool
    ) -> None:
        """Plans the layout.

        Args:
            contribution: the contribution of a leaf
            variables: the variables of the gradients by objective
            are_exchanged: whether devices exchange the numbers; otherwise each tensor is a bucket
        """
        self.variables = variables
        summands = contribution._replace(output=[], batch=[])
        self._structure = tf.nest.map_structure(lambda _: 0, summands)
        bucket_bytes = BUCKET_BYTES if are_exchanged else 0
        self.packing = GradientPacking(tf.nest.flatten(summands), bucket_bytes)

    @property
    def signature(self) -> tuple[Any, ...]:
        """A value that differs for layouts of other variables or other buckets."""
        ids = [(name, *map(id, group)) for name, group in self.variables.items()]
        return (*ids, *self.packing.dense.buckets)

    def pack(self, contribution: Contribution) -> PackedContribution:
        """Packs the contribution of a leaf."""
        summands = contribution._replace(output=[], batch=[])
        buckets = self.packing.pack(tf.nest.flatten(summands))
        return PackedContribution(
            buckets, contribution.loss, contribution.output, contribution.batch
        )

    def restore_shapes(self, packed: PackedContribution) -> PackedContribution:
        """Returns a contribution from a graph function, with the static shapes of gradients."""
        return packed._replace(buckets=self.packing.restore_shapes(packed.buckets))

    def unpack(self, buckets: list[Gradient]) -> Contribution:
        """Returns the numbers in buckets, or in sums of buckets."""
        tensors = self.packing.unpack(buckets)
        summed: Contribution = tf.nest.pack_sequence_as(self._structure, tensors)
        return summed


def sum_over_replicas(values: Structure, replicas: int) -> Structure:
    """Sums a structure of tensors over the replicas with a single all-reduce for each dtype.

    Must be called in a replica context. The sum of sparse tensors contains the rows of all
    replicas, see ``merge_rows``.

    Args:
        values: the structure; it contains no tensors if all variables of a turn are frozen
        replicas: the number of replicas of all processes
    """
    if replicas == 1 or not tf.nest.flatten(values):
        return values
    context = tf.distribute.get_replica_context()
    if isinstance(context.strategy, tf.distribute.MultiWorkerMirroredStrategy):
        values = tf.nest.map_structure(_fix_shape, values)
    flat = tf.nest.flatten(values)
    summed = reduce_by_dtype(context, tf.distribute.ReduceOp.SUM, map(_split, flat))
    merged = [_merge(value, total) for value, total in zip(flat, summed, strict=True)]
    return tf.nest.pack_sequence_as(values, merged)


def _split(value: Gradient) -> Gradient:
    """Stacks the real and imaginary parts of complex gradients, which no collective can sum."""
    if not value.dtype.is_complex:
        return value
    if isinstance(value, tf.IndexedSlices):
        assert value.dense_shape is not None
        shape = tf.concat([value.dense_shape, [2]], 0)
        return tf.IndexedSlices(encode_for_sum(value.values), value.indices, shape)
    return encode_for_sum(value)


def _merge(value: Gradient, summed: Gradient) -> Gradient:
    """Converts the sum of the results of ``_split`` back to the dtype of a gradient."""
    if not value.dtype.is_complex:
        return summed
    if isinstance(summed, tf.IndexedSlices):
        assert isinstance(value, tf.IndexedSlices)  # like the sum
        values = decode_sum(summed.values, value.dtype)
        return tf.IndexedSlices(values, summed.indices, value.dense_shape)
    return decode_sum(summed, value.dtype)


def merge_rows(values: Structure, compiled: bool) -> Structure:
    """Adds up the rows of sparse gradients that have the same index; dense gradients are unchanged.

    Without this, the norm of the rows would not be the norm of the gradient, and clipping would
    depend on how often an index occurs.

    Args:
        values: a structure of gradients
        compiled: whether sizes have to be static, as XLA requires. The number of rows then stays
            the same: superfluous rows are 0 and have an index after the last valid one, so that
            every use of the gradient ignores them.
    """
    return tf.nest.map_structure(partial(_merge_rows, compiled), values)


def _fix_shape(value: Gradient) -> Gradient:
    """Converts a sparse gradient with a varying number of rows to a dense gradient.

    Collectives require static shapes.
    """
    if isinstance(value, tf.IndexedSlices) and value.values.shape[0] is None:
        return tf.convert_to_tensor(value)
    return value


def _merge_rows(compiled: bool, gradient: Gradient) -> Gradient:
    """Adds up the rows of a sparse gradient that have the same index, in the order of the rows.

    If each replica added them in a different order, the sums would be rounded differently, and the
    weights of the replicas would drift apart.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if compiled:
        return _merge_rows_in_place(gradient)
    unique, rows = tf.unique(gradient.indices)
    # On GPUs, an unsorted sum adds the rows in an arbitrary order.
    if tf.config.list_logical_devices("GPU"):
        order = tf.argsort(rows, stable=True)
        ordered = tf.gather(rows, order)
        values = tf.sparse.segment_sum(gradient.values, order, ordered, tf.size(unique))
    else:
        values = tf.math.unsorted_segment_sum(gradient.values, rows, tf.size(unique))
    return tf.IndexedSlices(values, unique, gradient.dense_shape)


def _merge_rows_in_place(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up rows with the same index without changing the number of rows.

    The first row with an index gets the sum, and the other rows get an unused index. This is faster
    than ``tf.unique``, which takes several times as long as a whole step if XLA compiles it.
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


def is_float8(dtype: tf.DType) -> bool:
    """Returns True for the dtypes of one byte, which few ops of TensorFlow support."""
    return bool(dtype.is_floating and dtype.size == 1)


def select(condition: tf.Tensor, value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns ``value`` where a condition is True, and ``other`` elsewhere, like ``tf.where``.

    ``tf.where`` does not support quantized numbers or float8.
    """
    dtype = value.dtype
    if dtype.is_quantized or is_float8(dtype):
        chosen = tf.where(condition, encode_for_sum(value), encode_for_sum(other))
        return decode_sum(chosen, dtype)
    return tf.where(condition, value, other)


def multiply(values: Structure, factor: tf.Tensor) -> Structure:
    """Multiplies all tensors of a structure, dense or sparse, by the same number."""
    return tf.nest.map_structure(
        lambda value: tf.math.scalar_mul(tf.cast(factor, value.dtype), value), values
    )


def accumulate(
    run: Callable[..., Any],
    micro_batches: int,
    contribute: Callable[[Count], tuple[PackedContribution, ContributionLayout]],
) -> tuple[PackedContribution, ContributionLayout]:
    """Adds up the contributions of micro-batches, on each replica's own device.

    A micro-batch starts only after the gradients of the previous micro-batch have been computed, so
    that the activations of only one micro-batch take up memory at a time. Without the loop,
    TensorFlow would run the micro-batches in parallel.

    Args:
        run: a function that calls another function on each replica, with that replica's values
        micro_batches: the number of micro-batches, at least 2
        contribute: a function that gets the index of a micro-batch, a scalar int32 tensor. It
            returns the contribution of the micro-batch and its layout, which is the same for all
            micro-batches.

    Returns:
        A contribution with a value for each replica, and its layout. Dense tensors are added up.
        The rows of sparse gradients are concatenated. Outputs and batches are lists with an entry
        for each micro-batch.
    """
    accumulator = MicroBatchAccumulator(micro_batches)
    # If the first index were a constant, the first micro-batch would have a static shape. The loop
    # would then require the same shape of all other micro-batches, which may have one row less.
    first, layout = contribute(tf.compat.v1.placeholder_with_default(0, []))
    totals = run(accumulator.begin, first)

    def add_next(index: tf.Tensor, totals: list[Any]) -> tuple[tf.Tensor, list[Any]]:
        contribution, _ = contribute(index)
        return index + 1, run(accumulator.add, totals, contribution, index)

    with tf.control_dependencies(_flatten(first.buckets)):
        _, totals = tf.while_loop(
            lambda index, _: index < micro_batches,
            add_next,
            (tf.constant(1), totals),
            parallel_iterations=1,
        )
    return run(accumulator.finish, totals, first), layout


class MicroBatchAccumulator:
    """Adds up the contributions of one replica's micro-batches.

    The totals are a flat list, because they are the loop variables of a ``tf.while_loop``. For each
    tensor of a contribution, the list contains the sum so far, or a TensorArray with an entry for
    each micro-batch.
    """

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches

    def begin(self, contribution: PackedContribution) -> list[tf.Tensor | tf.TensorArray]:
        """Returns the totals after the first micro-batch."""
        totals: list[tf.Tensor | tf.TensorArray] = []
        for tensor, is_listed in self._label_tensors(contribution):
            if is_listed:
                array = tf.TensorArray(tensor.dtype, self._micro_batches, infer_shape=False)
                totals.append(array.write(0, tensor))
            else:
                totals.append(tensor)
        return totals

    def add(
        self,
        totals: list[tf.Tensor | tf.TensorArray],
        contribution: PackedContribution,
        index: tf.Tensor,
    ) -> list[tf.Tensor | tf.TensorArray]:
        """Returns the totals after one more micro-batch.

        Args:
            totals: the totals before this micro-batch
            contribution: the contribution of the micro-batch
            index: the index of the micro-batch, a scalar int32 tensor
        """
        updated: list[tf.Tensor | tf.TensorArray] = []
        for total, tensor in zip(totals, _flatten(contribution), strict=True):
            if isinstance(total, tf.TensorArray):
                updated.append(total.write(index, tensor))
            else:
                updated.append(tf.ensure_shape(total + tensor, total.shape))
        return updated

    def finish(self, totals: list[Any], first: PackedContribution) -> PackedContribution:
        """Returns the sum of all contributions.

        Args:
            totals: the totals after the last micro-batch
            first: the contribution of the first micro-batch, which has the structure of the result
        """
        listed = range(1)
        if any(is_listed for _, is_listed in self._label_tensors(first)):
            listed = range(self._micro_batches)
        by_index = [self._read(totals, first, index) for index in listed]
        summed: PackedContribution = tf.nest.map_structure(_join_sparse, *by_index)
        return summed._replace(
            output=[contribution.output[0] for contribution in by_index if contribution.output],
            batch=[contribution.batch[0] for contribution in by_index if contribution.batch],
        )

    def _read(self, totals: list[Any], first: PackedContribution, index: int) -> PackedContribution:
        """Returns a contribution built from the totals.

        It contains the sums, and the listed tensors of the micro-batch with the given index.
        """
        tensors = []
        for total, tensor in zip(totals, _flatten(first), strict=True):
            if not isinstance(total, tf.TensorArray):
                # The result of a loop has no device, but a reduction over replicas requires a
                # device.
                tensors.append(tf.identity(total))
            elif tf.get_static_value(tensor) is not None:
                # This is the shape of a sparse gradient, which has to be a constant for XLA.
                tensors.append(tensor)
            else:
                tensors.append(tf.ensure_shape(total.read(index), tensor.shape))
        packed: PackedContribution = tf.nest.pack_sequence_as(
            first, tensors, expand_composites=True
        )
        return packed

    def _label_tensors(self, contribution: PackedContribution) -> Iterator[tuple[tf.Tensor, bool]]:
        """Yields each tensor of a contribution, and whether it is listed for each micro-batch.

        If the flag is False, the tensors of all micro-batches are added up.
        """
        for name, field in contribution._asdict().items():
            for value in tf.nest.flatten(field):
                is_listed = name in PIECES or isinstance(value, tf.IndexedSlices)
                for tensor in _flatten(value):
                    yield tensor, is_listed


def _flatten(structure: Structure) -> list[tf.Tensor]:
    """Returns all tensors of a structure, including the components of ragged and sparse ones."""
    return tf.nest.flatten(structure, expand_composites=True)


def _join_sparse(*values: Gradient) -> Gradient:
    """Concatenates the sparse gradients of micro-batches; any other value is already a sum."""
    if isinstance(values[0], tf.IndexedSlices):
        joined: Gradient = join(*values)
        return joined
    return values[0]


def join_pieces(pieces: list[Structure]) -> Structure:
    """Joins the outputs, or the batches, of a replica's micro-batches."""
    if len(pieces) == 1:
        return restore_constants(pieces[0])
    return _join_tensors(join, pieces)


def join_pieces_for_host(pieces: list[Structure]) -> Structure:
    """Joins the outputs, or the batches, of all micro-batches of all replicas; for eager tensors.

    Scalars become a vector even if there is only one piece.
    """
    return _join_tensors(join_for_host, pieces)


def _join_tensors(join_values: Callable[..., Any], pieces: list[Structure]) -> Structure:
    """Joins the tensors of pieces; constants are those of the first piece."""
    by_tensor = zip(*map(tf.nest.flatten, pieces), strict=True)
    joined = [join_values(*tensors) for tensors in by_tensor]
    return restore_constants(tf.nest.pack_sequence_as(pieces[0], joined))


def join(*values: Any) -> Any:
    """Concatenates tensors, dense or sparse, along the first axis; scalars become a vector.

    All values, and the result, are of the same kind: dense, ragged or sparse tensors, or gradients.
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
    return tf.concat(values, 0)


def join_for_host(*values: Any) -> Any:
    """Concatenates eager tensors, all of the same kind, along the first axis.

    Dense tensors become ragged if their sizes differ in any other axis.
    """
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
