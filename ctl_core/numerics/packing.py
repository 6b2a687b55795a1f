"""Packs tensors into buckets, so that one addition and one exchange handle many tensors.

A bucket is a vector of one dtype. Packing copies tensors without changing any bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

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
