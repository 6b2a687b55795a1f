"""Exchanges values of any dtype and form between replicas, and rejects what cannot be exchanged.

TensorFlow's collectives accept only some dtypes, and fewer in a cluster than in one process. Values
of other dtypes are therefore converted before an exchange, and converted back afterwards. Ragged,
sparse and string tensors are exchanged in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import tensorflow as tf

from ctl_core.run.errors import RefusedCall
from ctl_core.types import AnyTensor, Gradient, Structure

GradientT = TypeVar("GradientT", bound=Gradient)

OPERATIONS = ("sum", "mean", "max", "min")
# The dtypes that an all-gather and an all-reduce accept on any device and in any cluster.
_GATHERED = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})
_SUMMED = frozenset({tf.float16, tf.bfloat16, tf.float32, tf.float64})
# The integers that represent quantized numbers.
_QUANTIZED = {
    tf.qint8: tf.int8,
    tf.quint8: tf.uint8,
    tf.qint16: tf.int16,
    tf.quint16: tf.uint16,
    tf.qint32: tf.int32,
}

do_not_convert = tf.autograph.experimental.do_not_convert


@do_not_convert
def check_gather(value: AnyTensor | Gradient, axis: int) -> None:
    """Checks that a value can be gathered, on any number of devices.

    Raises:
        RefusedCall: it cannot be gathered; the message says why, and what to do.
    """
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        if axis != 0:
            kind = _describe(value)
            raise RefusedCall(f"all_gather can join {kind} along axis 0 only, not {axis}.")
        return
    if isinstance(value, tf.IndexedSlices):
        raise RefusedCall(
            "all_gather got tf.IndexedSlices; convert them with tf.convert_to_tensor."
        )
    if not (_is_number(value.dtype) or value.dtype.is_bool or value.dtype == tf.string):
        raise RefusedCall(f"all_gather got a tensor of dtype {value.dtype.name}; cast it.")
    rank = value.shape.rank
    if rank == 0:
        raise RefusedCall(
            "all_gather got a scalar; give it the shape [1], for example with tf.reshape(x, [1])."
        )
    if rank is not None and not -rank <= axis < rank:
        raise RefusedCall(f"all_gather got axis={axis} for a tensor with {rank} axes.")


@do_not_convert
def check_reduce(value: AnyTensor | Gradient, operation: str) -> None:
    """Checks that a value can be reduced, on any number of devices.

    Args:
        value: the value
        operation: one of ``OPERATIONS``, or an unknown name

    Raises:
        RefusedCall: it cannot be reduced; the message says why, and what to do.
    """
    if operation not in OPERATIONS:
        names = ", ".join(f'"{name}"' for name in OPERATIONS)
        raise RefusedCall(f'all_reduce got the operation "{operation}"; expected one of {names}.')
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise RefusedCall(
            f"all_reduce got {_describe(value)}, whose shape may differ between replicas; use "
            "all_gather, or reduce a dense tensor."
        )
    dtype = value.dtype
    if not _is_number(dtype):
        cure = "cast it to int32" if dtype.is_bool else "use all_gather"
        raise RefusedCall(f"all_reduce got a tensor of dtype {dtype.name}; {cure}.")
    if operation == "mean" and dtype.is_integer:
        raise RefusedCall(
            f"all_reduce got {dtype.name} for a mean, which is not an integer; cast the tensor to "
            "float32."
        )
    if operation in ("max", "min") and dtype.is_complex:
        raise RefusedCall(
            f'all_reduce got {dtype.name} for "{operation}", but complex numbers have no order; '
            "reduce real numbers."
        )


def _is_number(dtype: tf.DType) -> bool:
    """Returns whether values of a dtype are numbers, and can be added up."""
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_complex
    return is_number and not dtype.is_quantized


def _describe(value: AnyTensor) -> str:
    """Returns the noun for a tensor that is not dense."""
    if isinstance(value, tf.RaggedTensor):
        return "a ragged tensor"
    return "a sparse tensor"


@do_not_convert
def gather(context: tf.distribute.ReplicaContext, value: AnyTensor, axis: int) -> AnyTensor:
    """Returns the values of all replicas, concatenated along an axis.

    Args:
        context: the context of the replica that calls this function
        value: a value that ``check_gather`` accepts
        axis: the axis
    """
    if isinstance(value, tf.RaggedTensor):
        return _gather_ragged(context, value)
    if isinstance(value, tf.SparseTensor):
        return _gather_sparse(context, value)
    return _gather_dense(context, value, axis)


def _gather_dense(context: tf.distribute.ReplicaContext, value: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the tensors of all replicas, concatenated along an axis.

    The gradient of ``tf.gather`` is sparse, and TensorFlow's gradient of an all-gather fails with a
    sparse gradient. The result is therefore reshaped, because the gradient of a reshape is dense.
    """
    if value.shape.rank is not None:
        axis %= value.shape.rank  # collectives do not accept negative axes
    dtype = value.dtype
    is_in_cluster = isinstance(context.strategy, tf.distribute.MultiWorkerMirroredStrategy)
    gathered: tf.Tensor
    if dtype in _GATHERED or (dtype in (tf.bfloat16, tf.string) and not is_in_cluster):
        gathered = context.all_gather(value, axis)
    elif dtype == tf.string:
        gathered = _gather_texts(context, value, axis)
    else:
        gathered = decode_sum(context.all_gather(encode_for_sum(value), axis), dtype)
    gathered = tf.reshape(gathered, tf.shape(gathered))
    sizes = value.shape
    if sizes.rank is not None:  # in a cluster, TensorFlow does not know the static shape
        gathered.set_shape([*sizes[:axis], None, *sizes[axis + 1 :]])
    return gathered


def _gather_ragged(
    context: tf.distribute.ReplicaContext, ragged: tf.RaggedTensor
) -> tf.RaggedTensor:
    """Returns the rows of all replicas."""
    values: tf.Tensor | tf.RaggedTensor
    if isinstance(ragged.values, tf.RaggedTensor):
        values = _gather_ragged(context, ragged.values)
    else:
        values = _gather_dense(context, ragged.values, 0)
    lengths = _gather_dense(context, ragged.row_lengths(), 0)
    length = ragged.uniform_row_length
    if length is not None:
        length = tf.get_static_value(length)
    if length is None:
        return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
    rows = tf.size(lengths, lengths.dtype)
    return tf.RaggedTensor.from_uniform_row_length(values, length, rows, validate=False)


def _gather_sparse(
    context: tf.distribute.ReplicaContext, sparse: tf.SparseTensor
) -> tf.SparseTensor:
    """Returns the rows of all replicas."""
    shapes = _gather_dense(context, sparse.dense_shape[tf.newaxis], 0)  # a row for each replica
    first_row = tf.reduce_sum(shapes[: context.replica_id_in_sync_group, 0])
    rows = sparse.indices[:, :1] + first_row
    return tf.SparseTensor(
        _gather_dense(context, tf.concat([rows, sparse.indices[:, 1:]], 1), 0),
        _gather_dense(context, sparse.values, 0),
        tf.concat([tf.reduce_sum(shapes[:, :1], 0), tf.reduce_max(shapes[:, 1:], 0)], 0),
    )


def _gather_texts(context: tf.distribute.ReplicaContext, texts: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the strings of all replicas, which are exchanged as integers."""
    order = [axis, *(other for other in range(len(texts.shape)) if other != axis)]
    moved = tf.transpose(texts, order)
    mark = ","  # commas do not occur in Base64, which is plain ASCII
    marked = tf.strings.join([tf.io.encode_base64(tf.reshape(moved, [-1])), mark])
    characters = tf.io.decode_raw(tf.strings.reduce_join(marked), tf.uint8)
    gathered = tf.cast(context.all_gather(tf.cast(characters, tf.int64), 0), tf.int32)
    lines = tf.strings.split(tf.strings.unicode_encode(gathered, "UTF-8"), mark)
    shape = tf.concat([[-1], tf.shape(moved)[1:]], 0)
    together = tf.reshape(tf.io.decode_base64(lines[:-1]), shape)
    return tf.transpose(together, [order.index(place) for place in range(len(order))])


@do_not_convert
def reduce(context: tf.distribute.ReplicaContext, value: Structure, operation: str) -> Structure:
    """Returns the sum, mean, maximum or minimum over all replicas.

    Args:
        context: the context of the replica that calls this function
        value: a structure of values that ``check_reduce`` accepts
        operation: one of ``OPERATIONS``
    """
    if operation == "max":
        return tf.nest.map_structure(lambda leaf: _choose(context, leaf, tf.reduce_max), value)
    if operation == "min":
        return tf.nest.map_structure(lambda leaf: _choose(context, leaf, tf.reduce_min), value)
    reduce_op = tf.distribute.ReduceOp[operation.upper()]
    leaves = tf.nest.flatten(value)
    reduced = reduce_by_dtype(context, reduce_op, map(_encode_number, leaves))
    decoded = [
        _decode_number(total, leaf.dtype) for total, leaf in zip(reduced, leaves, strict=True)
    ]
    return tf.nest.pack_sequence_as(value, decoded)


@do_not_convert
def reduce_by_dtype(
    context: tf.distribute.ReplicaContext,
    reduce_op: tf.distribute.ReduceOp,
    values: Iterable[GradientT],
) -> list[GradientT]:
    """Reduces tensors over the replicas, with an all-reduce for each dtype.

    In a cluster, TensorFlow joins the tensors of an all-reduce, which is not possible if they
    differ in dtype.

    Args:
        context: the context of the replica that calls this function
        reduce_op: the sum or the mean
        values: the tensors, whose dtypes every all-reduce accepts
    """
    values = list(values)
    reduced: dict[int, GradientT] = {}
    for dtype in dict.fromkeys(value.dtype for value in values):
        group = {index: value for index, value in enumerate(values) if value.dtype == dtype}
        reduced |= context.all_reduce(reduce_op, group)
    return [reduced[index] for index in range(len(values))]


def _encode_number(value: Gradient) -> Gradient:
    """Converts a tensor, but not sparse gradients, to a dtype that every all-reduce accepts."""
    if isinstance(value, tf.IndexedSlices) or value.dtype in _SUMMED:
        return value
    return encode_for_sum(value)


def _decode_number(encoded: Gradient, dtype: tf.DType) -> Gradient:
    """Converts the sum of the results of ``_encode_number`` back to a dtype."""
    if isinstance(encoded, tf.IndexedSlices) or dtype in _SUMMED:
        return encoded
    return decode_sum(encoded, dtype)


def _choose(
    context: tf.distribute.ReplicaContext,
    value: Gradient,
    choose: Callable[[Gradient, int], tf.Tensor],
) -> tf.Tensor:
    """Returns the maximum or the minimum over the replicas that have rows.

    The values are gathered as the sum of tensors with a row for each replica. A replica without
    rows adds nothing to this sum.

    Args:
        context: the context of the replica that calls this function
        value: the value of this replica
        choose: ``tf.reduce_max`` or ``tf.reduce_min``
    """
    value = tf.convert_to_tensor(value)
    encoded = _encode_number(value)
    number = tf.cast(context.replica_id_in_sync_group, tf.int32)
    is_own = tf.equal(tf.range(context.num_replicas_in_sync), number)
    column = tf.reshape(is_own, tf.concat([[-1], tf.ones([tf.rank(value)], tf.int32)], 0))
    own_row = tf.where(column, encoded, tf.zeros_like(encoded))
    rows, has_rows = reduce(context, (own_row, tf.cast(is_own, own_row.dtype)), "sum")
    real_rows = tf.boolean_mask(rows, tf.equal(has_rows, 1))
    return choose(_decode_number(real_rows, value.dtype), 0)


def encode_for_sum(value: tf.Tensor) -> tf.Tensor:
    """Converts a tensor to float32, float64 or int64 without loss, so that it can be summed.

    Every all-reduce supports these three dtypes. NCCL does not support bool, complex numbers or
    small integers. TensorFlow sums int32 on the host, and separately from all other dtypes. The
    real and imaginary parts of complex numbers are stacked along a new last axis. Quantized numbers
    become the integers that represent them. Strings cannot be converted.
    """
    dtype = value.dtype
    if dtype in _QUANTIZED:
        return tf.cast(tf.bitcast(value, _QUANTIZED[dtype]), tf.int64)
    if dtype.is_complex:
        return tf.stack([tf.math.real(value), tf.math.imag(value)], axis=-1)
    if dtype == tf.uint64:  # its largest numbers do not fit into int64
        return tf.bitcast(value, tf.int64)
    if dtype.is_bool or dtype.is_integer:
        return tf.cast(value, tf.int64)
    if dtype == tf.float64:
        return value
    return tf.cast(value, tf.float32)


def decode_sum(encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Converts the result of ``encode_for_sum``, or a sum of such results, back to a dtype."""
    if dtype in _QUANTIZED:
        return tf.bitcast(tf.cast(encoded, _QUANTIZED[dtype]), dtype)
    if dtype.is_complex:
        return tf.complex(encoded[..., 0], encoded[..., 1])
    if dtype == tf.uint64:
        return tf.bitcast(encoded, tf.uint64)
    return tf.cast(encoded, dtype)
