"""Packs tensors into buckets, so that one addition and one exchange handle many tensors.

A bucket is a vector of one dtype. Packing copies tensors without changing any bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ctl_core.types import Gradient

# The maximum size in bytes of a bucket with several tensors. A larger tensor gets its own bucket.
BUCKET_BYTES = 4 * 2**20


class Bucket(NamedTuple):
    """Describes which tensors are packed into a bucket.

    Attributes:
        dtype: the dtype of all its tensors
        indices: the indices of its tensors in the list of all tensors, in order
        sizes: the number of elements of each of its tensors
    """

    dtype: tf.DType
    indices: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements in the bucket."""
        return sum(self.sizes)


def find_length(tensor: tf.Tensor) -> int:
    """Returns the length of a tensor's first axis, which has to be static."""
    length = tensor.shape[0]
    assert length is not None
    return length


class Packing:
    """Packs a list of tensors into buckets, and unpacks them.

    Attributes:
        buckets: the buckets
    """

    def __init__(self, specs: Sequence[tf.TensorSpec], bucket_bytes: int) -> None:
        """Assigns tensors to buckets, in order.

        Args:
            specs: the specifications of the tensors, whose shapes are static
            bucket_bytes: the maximum size in bytes of a bucket with several tensors
        """
        self._shapes: list[tuple[Any, ...]] = [tuple(spec.shape.as_list()) for spec in specs]
        assigned: list[tuple[tf.DType, list[int]]] = []
        open_buckets: dict[tf.DType, list[int]] = {}
        used_bytes: dict[tf.DType, int] = {}
        for index, spec in enumerate(specs):
            dtype = spec.dtype
            needed = math.prod(self._shapes[index]) * dtype.size
            if dtype not in open_buckets or used_bytes[dtype] + needed > bucket_bytes:
                open_buckets[dtype] = []
                used_bytes[dtype] = 0
                assigned.append((dtype, open_buckets[dtype]))
            open_buckets[dtype].append(index)
            used_bytes[dtype] += needed
        self.buckets = [
            Bucket(dtype, tuple(indices), tuple(math.prod(self._shapes[i]) for i in indices))
            for dtype, indices in assigned
        ]

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Packs tensors into buckets, and returns a vector for each bucket."""
        packed = []
        for bucket in self.buckets:
            vectors = [tf.reshape(tensors[index], [-1]) for index in bucket.indices]
            packed.append(vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0))
        return packed

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Unpacks the result of ``pack``, and returns the tensors in their original order."""
        tensors: dict[int, tf.Tensor] = {}
        for bucket, vector in zip(self.buckets, packed, strict=True):
            pieces = [vector]
            if len(bucket.indices) > 1:
                pieces = tf.split(vector, bucket.sizes)
            for index, piece in zip(bucket.indices, pieces, strict=True):
                tensors[index] = tf.reshape(piece, self._shapes[index])
        return [tensors[index] for index in range(len(self._shapes))]


class GradientPacking:
    """Packs gradients and other tensors, which may be dense or sparse.

    Dense tensors share buckets. A sparse gradient, or a tensor whose shape varies, is a bucket of
    its own.

    Attributes:
        dense: the assignment of dense tensors to buckets, which come before all other buckets
    """

    def __init__(self, tensors: Sequence[Gradient], bucket_bytes: int) -> None:
        """Assigns tensors to buckets, in order.

        Args:
            tensors: tensors like those to pack, from any graph
            bucket_bytes: the maximum size in bytes of a bucket with several tensors
        """
        self._are_dense = [_has_fixed_shape(tensor) for tensor in tensors]
        dense, others = self._split(tensors)
        self._dense_shapes = [_read_dense_shape(tensor) for tensor in others]
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in dense]
        self.dense = Packing(specs, bucket_bytes)

    def pack(self, tensors: Sequence[Gradient]) -> list[Gradient]:
        """Returns the buckets."""
        dense, others = self._split(tensors)
        return [*self.dense.pack(dense), *others]

    def unpack(self, buckets: Sequence[Gradient]) -> list[Gradient]:
        """Unpacks the result of ``pack``, and returns the tensors in their original order."""
        count = len(self.dense.buckets)
        packed = [tf.convert_to_tensor(bucket) for bucket in buckets[:count]]
        dense: Iterator[Gradient] = iter(self.dense.unpack(packed))
        others = iter(buckets[count:])
        return [next(dense if is_dense else others) for is_dense in self._are_dense]

    def restore_shapes(self, buckets: Sequence[Gradient]) -> list[Gradient]:
        """Returns buckets that a graph function returned, with the static shapes of gradients."""
        first = len(self.dense.buckets)
        pairs = zip(buckets[first:], self._dense_shapes, strict=True)
        others = [_restore_shape(bucket, shape) for bucket, shape in pairs]
        return [*buckets[:first], *others]

    def _split(self, tensors: Sequence[Gradient]) -> tuple[list[tf.Tensor], list[Gradient]]:
        """Returns the tensors that share buckets, and all others, each in their order."""
        pairs = list(zip(tensors, self._are_dense, strict=True))
        dense = [tf.convert_to_tensor(tensor) for tensor, is_dense in pairs if is_dense]
        return dense, [tensor for tensor, is_dense in pairs if not is_dense]


def _has_fixed_shape(tensor: Gradient) -> bool:
    """Returns whether a tensor is dense, and all of its sizes are known."""
    return isinstance(tensor, tf.Tensor) and bool(tensor.shape.is_fully_defined())


def _read_dense_shape(tensor: Gradient) -> tuple[int, ...] | None:
    """Returns the static shape that a sparse gradient represents; None for any other tensor."""
    if not isinstance(tensor, tf.IndexedSlices) or tensor.dense_shape is None:
        return None
    shape = tf.get_static_value(tensor.dense_shape)
    return None if shape is None else tuple(map(int, shape))


def _restore_shape(tensor: Gradient, shape: tuple[int, ...] | None) -> Gradient:
    """Returns a sparse gradient with a static shape, or any other tensor unchanged."""
    if shape is None or not isinstance(tensor, tf.IndexedSlices):
        return tensor
    dense_shape = tf.constant(shape, tensor.indices.dtype)
    return tf.IndexedSlices(tensor.values, tensor.indices, dense_shape)
