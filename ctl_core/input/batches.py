"""Cuts a global batch into shares. A share contains the rows of one replica in one micro-batch.

With N replicas and A micro-batches, a global batch has N x A shares. Their numbers of rows differ
by at most one. Therefore, a batch size that is not divisible by N x A, a smaller last batch, and a
resume on another number of devices need no special treatment: the result of a run depends only on
the data, the seed and the global batch size.
"""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from ctl_core.cluster.collectives import count_local_replicas, distribute
from ctl_core.hooks.defaults import get_first_dimension
from ctl_core.types import AnyTensor, AnyTensorSpec, Batch, BatchSpec, Count, PerReplica, Structure


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The sizes that determine how a global batch is divided into shares.

    Attributes:
        batch: the number of examples in a global batch, B
        replicas: the number of replicas in all processes, N
        accumulate_steps: the number of micro-batches, A
        by_rows: True if a share consists of rows of the global batch; False if a share is a whole
            element of the dataset, see sharing.py
        logical_replicas: the number of logical replicas, V; None if they are not used. If they are
            used, each logical replica has one share, and N and A do not affect the shares
        element_spec: the specification of the elements of the dataset if ``by_rows`` is False;
            otherwise None
    """

    batch: int
    replicas: int
    accumulate_steps: int
    by_rows: bool = True
    logical_replicas: int | None = None
    element_spec: BatchSpec | None = None

    @property
    def shares(self) -> int:
        """The number of shares in a global batch: N x A, or V."""
        if self.logical_replicas is not None:
            return self.logical_replicas
        return self.replicas * self.accumulate_steps

    @property
    def per_replica(self) -> int:
        """The global batch size divided by the number of shares, rounded down, but at least 1."""
        return max(1, self.batch // self.shares)

    def count_rows_of(
        self, replica: Count, examples: Count
    ) -> tuple[tf.Tensor | None, tf.Tensor | None]:
        """Returns the number of rows of a replica in a global batch, and whether it has any.

        Both values are None if all replicas have the same number of rows.

        Args:
            replica: the index of the replica among the replicas of all processes
            examples: the number of examples in the batch
        """
        if isinstance(examples, int) and examples % self.shares == 0:
            return None, None
        rows_of_each = examples // self.shares
        remainder = examples % self.shares
        larger_shares = tf.maximum(remainder - replica + self.replicas - 1, 0) // self.replicas
        rows = self.accumulate_steps * rows_of_each + larger_shares
        return rows, rows > 0

    def count_rows_before(self, replica: Count, examples: Count) -> tf.Tensor:
        """Returns the number of rows of all replicas with an index below ``replica``, an int32."""
        replica = tf.cast(replica, tf.int32)
        replicas = tf.range(self.replicas)
        rows, _ = self.count_rows_of(replicas, examples)
        if rows is None:
            return replica * (examples // self.replicas)
        return tf.reduce_sum(tf.where(replicas < replica, tf.cast(rows, tf.int32), 0))


class ShareWeight(NamedTuple):
    """The result of ``batch_weight`` for a share, if it is known before the backward pass.

    Attributes:
        weight: the weight of the share, a scalar
        total: the sum of the weights of all shares, a scalar
    """

    weight: tf.Tensor
    total: tf.Tensor


class Share(NamedTuple):
    """The rows of one replica in a micro-batch.

    Attributes:
        batch: the rows. If the share is empty, this is a placeholder: an existing row of the batch,
            which does not affect any result
        rows: the number of rows, an int32 scalar; None if all shares have the same number of rows
        present: whether the share has any rows, a bool scalar; None if every share has rows
        together: the total number of rows of all replicas in the micro-batch, an int32 scalar; None
            if all replicas have the same number of rows, or if replica 0 has all rows
        weight: the weight of the share; None if it is not computed before the forward pass
    """

    batch: Batch
    rows: tf.Tensor | None = None
    present: tf.Tensor | None = None
    together: tf.Tensor | None = None
    weight: ShareWeight | None = None


def find_start(share: Count, examples: Count, shares: int) -> tf.Tensor:
    """Returns the index of the first row of a share. Larger shares come before smaller ones."""
    return share * (examples // shares) + tf.minimum(share, examples % shares)


def find_rows(device_shares: range, examples: Count, shares: int) -> tuple[Count, Count]:
    """Returns the index of the first row of a device, and the number of rows of the device.

    If the number of examples varies, a device without rows gets the last row as a placeholder.

    Args:
        device_shares: the indices of the shares that belong to the device
        examples: the number of examples, an int if it is fixed, otherwise an int32 tensor
        shares: the total number of shares on all devices
    """
    first: Count
    end: Count
    if isinstance(examples, int):
        first, end = (
            share * (examples // shares) + min(share, examples % shares)
            for share in (device_shares.start, device_shares.stop)
        )
        return first, end - first
    first = tf.minimum(find_start(device_shares.start, examples, shares), examples - 1)
    end = tf.maximum(find_start(device_shares.stop, examples, shares), first + 1)
    return first, end - first


def take_share(
    batch: Batch,
    examples: Count,
    index: Count,
    shares: int,
    replicas: int,
) -> Share:
    """Returns the rows of a share.

    Args:
        batch: a structure of tensors; each tensor has one row per example, or is a scalar
        examples: the number of examples, an int if it is fixed, otherwise an int32 tensor
        index: the index of the share, an int or an int32 tensor
        shares: the number of shares in the global batch
        replicas: the number of shares in a micro-batch
    """
    if shares == 1:
        return Share(batch)
    if isinstance(examples, int) and examples % shares == 0:
        size: Count = examples // shares
        return Share(take_batch_rows(batch, index * size, size))
    first = find_start(index, examples, shares)
    rows = find_start(index + 1, examples, shares) - first
    micro_batch = index - index % replicas
    end_of_micro_batch = find_start(micro_batch + replicas, examples, shares)
    together = end_of_micro_batch - find_start(micro_batch, examples, shares)
    size = rows
    present = None
    if not isinstance(examples, int) or examples < shares:
        present = rows > 0
        size = tf.maximum(rows, 1)
        first = tf.minimum(first, examples - size)
    return Share(take_batch_rows(batch, first, size), rows, present, together)


def pack_elements(elements: list[Batch]) -> tf.Tensor:
    """Packs elements into one tensor. The tensors of the elements may differ in shape.

    Args:
        elements: the elements, which have the same structure and the same dtypes

    Returns:
        A string tensor with one row for each element, and one column for each tensor in an element.
    """
    rows = []
    for element in elements:
        tensors = tf.nest.flatten(element, expand_composites=True)
        rows.append(tf.stack([tf.io.serialize_tensor(tensor) for tensor in tensors]))
    return tf.stack(rows)


def unpack_element(row: tf.Tensor, spec: BatchSpec) -> Batch:
    """Returns an element that was packed by ``pack_elements``.

    Args:
        row: the row of the packed tensor that contains the element
        spec: the specification of the element
    """
    with tf.device("CPU:0"):
        tensors = [
            tf.ensure_shape(tf.io.parse_tensor(row[column], tensor_spec.dtype), tensor_spec.shape)
            for column, tensor_spec in enumerate(tf.nest.flatten(spec, expand_composites=True))
        ]
    return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)


def distribute_shares(strategy: tf.distribute.Strategy, shares: list[Share]) -> Share:
    """Combines the shares of this process's replicas into one share with per-replica values."""
    fields: list[PerReplica | None] = []
    for values in zip(*shares, strict=True):
        if values[0] is None:
            fields.append(None)
        else:
            fields.append(distribute(strategy, list(values)))
    return Share(*fields)


def find_first_replica(strategy: tf.distribute.Strategy) -> int:
    """Returns the index of this process's first replica among the replicas of all processes."""
    resolver = strategy.cluster_resolver
    if resolver is None:
        return 0
    return int(resolver.task_id or 0) * count_local_replicas(strategy)


def take_batch_rows(batch: Batch, first: Count, size: Count) -> Batch:
    """Returns ``size`` rows of a batch, starting at row ``first``."""
    return tf.nest.map_structure(lambda tensor: take_rows(tensor, first, size), batch)


def take_rows(tensor: AnyTensor, first: Count, size: Count) -> AnyTensor:
    """Returns ``size`` rows of a tensor, starting at row ``first``.

    A scalar is returned unchanged, because it belongs to all rows.

    Args:
        tensor: a dense, ragged or sparse tensor
        first: the index of the first row
        size: the number of rows
    """
    if isinstance(tensor, tf.SparseTensor):
        start = tf.one_hot(0, tensor.shape.rank, tf.cast(first, tf.int64), dtype=tf.int64)
        rows = tf.cast(tf.reshape(size, [1]), tf.int64)
        return tf.sparse.slice(tensor, start, tf.concat([rows, tensor.dense_shape[1:]], 0))
    if tensor.shape.rank == 0:
        return tensor
    if isinstance(size, int) and not isinstance(tensor, tf.RaggedTensor):
        # With explicit sizes, the static shape of the slice is known even if ``first`` is a tensor.
        lengths = [-1 if length is None else length for length in tensor.shape[1:]]
        return tf.slice(tensor, [first] + [0] * len(lengths), [size, *lengths])
    return tensor[first : first + size]


def keep_rows_if(present: tf.Tensor, values: Structure) -> Structure:
    """Removes the rows of all tensors in a structure if these rows are placeholders.

    Args:
        present: whether the rows are real rather than placeholders, a bool scalar
        values: the structure. Scalars, and values that are not tensors, are not changed

    Returns:
        The structure, in which tensors have 0 rows if ``present`` is False.
    """

    def keep(value: AnyTensor) -> AnyTensor:
        if not tf.is_tensor(value) or not value.shape.rank:
            return value
        return take_rows(value, 0, tf.where(present, count_rows(value), 0))

    return tf.nest.map_structure(keep, values)


def count_rows(batch: Batch) -> tf.Tensor:
    """Returns the number of rows in a batch, an int32 scalar."""
    first = next(tensor for tensor in tf.nest.flatten(batch) if tensor.shape.rank != 0)
    return tf.cast(get_first_dimension(first), tf.int32)


def add_to_digest(digest: tf.Tensor | tf.Variable, batch: Batch) -> tf.Tensor:
    """Adds a batch to a checksum of batches.

    The checksum covers the shapes of each batch and one of its rows. The checksum of the earlier
    batches determines the index of this row, so the index changes from batch to batch.

    Args:
        digest: the checksum of the earlier batches
        batch: the batch to add

    Returns:
        The checksum of all batches, an int64 scalar.
    """
    digest = tf.convert_to_tensor(digest)
    tensors = tf.nest.flatten(batch, expand_composites=True)
    texts = [tf.io.serialize_tensor(_take_row(tensor, digest)) for tensor in tensors]
    texts += [tf.io.serialize_tensor(tf.shape(tensor)) for tensor in tensors]
    return 31 * digest + tf.strings.to_hash_bucket_fast(tf.strings.join(texts), 2**40)


def _take_row(tensor: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Returns the row at the index ``number`` modulo the number of rows.

    A scalar is returned unchanged.
    """
    if tensor.shape.rank == 0:
        return tensor
    rows = tf.shape(tensor, tf.int64)[0]
    row = number % tf.maximum(rows, 1)
    return tensor[row : row + 1]


def has_varying_widths(spec: BatchSpec) -> bool:
    """Returns whether the shape of a dense tensor may vary in a dimension other than the first."""
    shapes = [
        tensor_spec.shape
        for tensor_spec in tf.nest.flatten(spec)
        if isinstance(tensor_spec, tf.TensorSpec)
    ]
    return any(shape.rank is None or None in shape[1:].as_list() for shape in shapes)


def set_rows(
    spec: AnyTensorSpec, rows: int | None = None, name: str | None = None
) -> AnyTensorSpec:
    """Returns the specification of a tensor with another number of rows.

    The shape of a scalar is not changed, because a scalar has no rows.

    Args:
        spec: the specification of a dense, ragged or sparse tensor
        rows: the new number of rows; None allows any number
        name: the name of the new specification, used only for a dense tensor
    """
    shape: tf.TensorShape | list[int | None] = spec.shape
    if spec.shape.rank:
        shape = [rows, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype, name)


def make_placeholders(spec: BatchSpec) -> Batch:
    """Returns a batch of graph placeholders that match a specification."""
    return tf.nest.map_structure(
        lambda tensor_spec: tf.compat.v1.placeholder(tensor_spec.dtype, tensor_spec.shape),
        spec,
        expand_composites=True,
    )
