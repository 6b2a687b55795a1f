"""Packs tensors into buckets, so that one addition and one exchange serve many of them.

A bucket is a vector of one dtype. Packing copies tensors, but changes no bit of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# The size from which on a bucket gets no further tensor. Larger tensors have a bucket of their own.
BUCKET_BYTES = 4 * 2**20


class Bucket(NamedTuple):
    """A bucket, before it is packed.

    Attributes:
        dtype: of all of its tensors
        indices: which tensors of the list it holds, in their order
        sizes: the number of elements of each of them
    """

    dtype: tf.DType
    indices: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements in the bucket."""
        return sum(self.sizes)


class Packing:
    """How a list of tensors is packed.

    Attributes:
        buckets: the buckets
    """

    def __init__(self, specs: Sequence[tf.TensorSpec], bucket_bytes: int) -> None:
        """Assigns tensors to buckets, in their order.

        Args:
            specs: the specifications of the tensors, whose shapes are fixed
            bucket_bytes: the size from which on a bucket gets no further tensor
        """
        self._shapes = [tuple(spec.shape.as_list()) for spec in specs]
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
        """Returns the buckets of the tensors, each a vector."""
        packed = []
        for bucket in self.buckets:
            vectors = [tf.reshape(tensors[index], [-1]) for index in bucket.indices]
            packed.append(vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0))
        return packed

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors that ``pack`` has packed, in the same order."""
        tensors: dict[int, tf.Tensor] = {}
        for bucket, vector in zip(self.buckets, packed, strict=True):
            pieces = [vector]
            if len(bucket.indices) > 1:
                pieces = tf.split(vector, bucket.sizes)
            for index, piece in zip(bucket.indices, pieces, strict=True):
                tensors[index] = tf.reshape(piece, self._shapes[index])
        return [tensors[index] for index in range(len(self._shapes))]
