"""Divides a global batch into leaves. A leaf is a part of the batch that is computed alone.

Each leaf has its own rows, its own random numbers and its own batch statistics. With N replicas and
A micro-batches, a global batch has N x A leaves. Their numbers of rows differ by at most one.
Therefore, a batch size that is not divisible by N x A, a smaller last batch, and a resume on
another number of devices need no special treatment: the result of a run depends only on the data,
the seed, the global batch size and the number of leaves.
"""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from ctl_core.cluster.collectives import count_local_replicas, distribute
from ctl_core.hooks.defaults import get_first_dimension
from ctl_core.numerics.summation_tree import split_leaves
from ctl_core.types import AnyTensor, AnyTensorSpec, Batch, BatchSpec, Count, PerReplica, Structure


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The sizes that determine how a global batch is divided into leaves.

    Each replica computes A leaves, one after another. All replicas compute one leaf at the same
    time, in a round; the index of a round is that of a micro-batch.

    Attributes:
        batch: the number of examples in a global batch, B
        replicas: the number of replicas in all processes, N
        accumulate_steps: the number of micro-batches, A
        by_rows: True if a leaf has rows of the global batch; False if a leaf has a whole element of
            the dataset, see sharing.py
        logical_replicas: the number of logical replicas, V; None if they are not used. If they are
            used, each logical replica is a leaf, and N and A do not affect the leaves
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
    def leaves(self) -> int:
        """The number of leaves of a global batch: N x A, or V."""
        if self.logical_replicas is not None:
            return self.logical_replicas
        return self.replicas * self.accumulate_steps

    @property
    def has_several_leaves(self) -> bool:
        """True if a batch is divided: the checks of a project then reject some layers.

        True for logical replicas even if there is only one, because a run keeps their number.
        """
        return self.leaves > 1 or self.logical_replicas is not None

    @property
    def has_evaluation_leaves(self) -> bool:
        """Like ``has_several_leaves``, for an evaluation."""
        return self.evaluation_leaves > 1 or self.logical_replicas is not None

    @property
    def evaluation_leaves(self) -> int:
        """The number of leaves of a batch in an evaluation, which has no micro-batches: N, or V."""
        if self.logical_replicas is not None:
            return self.logical_replicas
        return self.replicas

    @property
    def per_replica(self) -> int:
        """The global batch size divided by the number of leaves, rounded down, but at least 1."""
        return max(1, self.batch // self.leaves)

    def find_leaf(self, replica: Count, micro_batch: Count) -> Count:
        """Returns the index of the leaf that a replica computes in a round.

        The leaves of a replica are contiguous rows of the batch. If a leaf is an element of the
        dataset, the elements are used in the order in which they are read.
        """
        if self.by_rows:
            return replica * self.accumulate_steps + micro_batch
        return micro_batch * self.replicas + replica

    def count_rows_of_round(self, micro_batch: Count, examples: Count) -> tf.Tensor:
        """Returns the number of rows of all replicas in a round, an int32 scalar.

        Args:
            micro_batch: the index of the round
            examples: the number of examples in the batch
        """
        # Leaf ``replica * A + micro_batch`` has one more row if its index is below the remainder.
        # This is the case for ceil((remainder - micro_batch) / A) replicas.
        longer_leaves = examples % self.leaves - micro_batch + self.accumulate_steps - 1
        longer_leaves = tf.maximum(longer_leaves, 0) // self.accumulate_steps
        rows: tf.Tensor = self.replicas * (examples // self.leaves) + longer_leaves
        return rows

    def count_rows_of(
        self, replica: Count, examples: Count
    ) -> tuple[tf.Tensor | None, tf.Tensor | None]:
        """Returns the number of rows of a replica in a global batch, and whether it has any.

        Both values are None if all replicas have the same number of rows.

        Args:
            replica: the index of the replica among the replicas of all processes
            examples: the number of examples in the batch
        """
        if isinstance(examples, int) and examples % self.leaves == 0:
            return None, None
        first = self.count_rows_before(replica, examples)
        rows = self.count_rows_before(replica + 1, examples) - first
        return rows, rows > 0

    def count_rows_before(self, replica: Count, examples: Count) -> tf.Tensor:
        """Returns the number of rows of all replicas with an index below ``replica``, an int32."""
        first_leaf = tf.cast(replica, tf.int32) * self.accumulate_steps
        return find_start(first_leaf, examples, self.leaves)


class ShareWeight(NamedTuple):
    """The result of ``batch_weight`` for a share, if it is known before the backward pass.

    Attributes:
        weight: the weight of the share, a scalar
        total: the sum of the weights of all shares, a scalar
    """

    weight: tf.Tensor
    total: tf.Tensor


class Share(NamedTuple):
    """The rows of a leaf.

    Attributes:
        batch: the rows. If the leaf has none, this is a placeholder: an existing row of the batch,
            which does not affect any result
        rows: the number of rows, an int32 scalar; None if all leaves have the same number of rows
        present: whether the leaf has any rows, a bool scalar; None if every leaf has rows
        together: the total number of rows of all leaves that are computed at the same time, an
            int32 scalar; None if all leaves have the same number of rows, or if leaf 0 has all rows
        weight: the weight of the leaf; None if it is not computed before the forward pass
        leaf: the index of the leaf, an int or an int32 scalar
    """

    batch: Batch
    rows: tf.Tensor | None = None
    present: tf.Tensor | None = None
    together: tf.Tensor | None = None
    weight: ShareWeight | None = None
    leaf: Count = 0


class LocatedBatch(NamedTuple):
    """A global batch, or its rows that this process has prepared.

    Attributes:
        rows: the rows; None if the shares of the batch are drawn one by one
        examples: the number of examples in the global batch
        first_row: the index of the first of the rows in the global batch
    """

    rows: Batch | None
    examples: Count
    first_row: Count = 0


def find_start(leaf: Count, examples: Count, leaves: int) -> tf.Tensor:
    """Returns the index of the first row of a leaf. Larger leaves come before smaller ones."""
    return leaf * (examples // leaves) + tf.minimum(leaf, examples % leaves)


def count_pass_batches(examples: int, batch: int, keeps_last_batch: bool) -> int:
    """Returns the number of global batches in a pass.

    Args:
        examples: the number of examples in the pass
        batch: the number of examples in a global batch
        keeps_last_batch: whether a smaller batch at the end counts
    """
    if keeps_last_batch:
        examples += batch - 1
    return examples // batch


def find_rows(device_leaves: range, examples: Count, leaves: int) -> tuple[Count, Count]:
    """Returns the index of the first row of a device, and the number of rows of the device.

    If the number of examples varies, a device without rows gets the last row as a placeholder.

    Args:
        device_leaves: the indices of the leaves that belong to the device
        examples: the number of examples, an int if it is fixed, otherwise an int32 tensor
        leaves: the total number of leaves on all devices
    """
    first: Count
    end: Count
    if isinstance(examples, int):
        first, end = (
            leaf * (examples // leaves) + min(leaf, examples % leaves)
            for leaf in (device_leaves.start, device_leaves.stop)
        )
        return first, end - first
    first = tf.minimum(find_start(device_leaves.start, examples, leaves), examples - 1)
    end = tf.maximum(find_start(device_leaves.stop, examples, leaves), first + 1)
    return first, end - first


def leaf_may_lack_rows(examples: Count, leaves: int) -> bool:
    """Returns whether a leaf may have no rows, which is known while a graph is traced.

    Args:
        examples: the number of examples in the batch, an int if it is fixed
        leaves: the number of leaves
    """
    if leaves == 1:
        return False
    return not isinstance(examples, int) or examples < leaves


def take_share(
    batch: Batch, examples: Count, leaf: Count, leaves: int, first_row: Count = 0
) -> Share:
    """Returns the rows of a leaf.

    A leaf without rows gets the last row of the global batch as a placeholder. It then writes the
    same values to variables as the last leaf with rows.

    Args:
        batch: a structure of tensors; each tensor has one row per example, or is a scalar
        examples: the number of examples in the global batch, an int if it is fixed, otherwise an
            int32 tensor
        leaf: the index of the leaf, an int or an int32 tensor
        leaves: the number of leaves in the global batch
        first_row: the index of the first row of ``batch`` in the global batch

    Returns:
        The rows. If leaves differ in size, ``together`` is the number of examples.
    """
    if leaves == 1:
        return Share(batch)
    if isinstance(examples, int) and examples % leaves == 0:
        size: Count = examples // leaves
        return Share(take_batch_rows(batch, leaf * size - first_row, size), leaf=leaf)
    first = find_start(leaf, examples, leaves)
    rows = find_start(leaf + 1, examples, leaves) - first
    size = rows
    present = None
    if leaf_may_lack_rows(examples, leaves):
        present = rows > 0
        size = tf.maximum(rows, 1)
        first = tf.minimum(first, examples - 1)
    taken = take_batch_rows(batch, first - first_row, size)
    return Share(taken, rows, present, tf.convert_to_tensor(examples), leaf=leaf)


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
    fields: list[PerReplica] = []
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


def find_process_leaves(shape: BatchShape, strategy: tf.distribute.Strategy) -> range:
    """Returns the indices of the leaves of a training batch that this process computes."""
    first = find_first_replica(strategy)
    end = first + count_local_replicas(strategy)
    if shape.logical_replicas is None:
        return range(first * shape.accumulate_steps, end * shape.accumulate_steps)
    device_leaves = split_leaves(shape.leaves, shape.replicas)[first:end]
    return range(device_leaves[0].start, device_leaves[-1].stop)


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


def list_sizes(element: Batch, examples: Count) -> tf.Tensor:
    """Returns the sizes that all processes must have in common, an int32 tensor of shape [1, n].

    These are the number of examples, and the shape of the rows in each dense tensor.

    Args:
        element: the rows of this process
        examples: the number of examples in the global batch
    """
    sizes = [tf.reshape(examples, [1])]
    for tensor in tf.nest.flatten(element):
        if isinstance(tensor, tf.Tensor):
            sizes.append(tf.shape(tensor)[1:])
    return tf.concat(sizes, 0)[None]


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


def unpack_arguments(dataset: tf.data.Dataset, arguments: tuple[Structure, ...]) -> Structure:
    """Returns the dataset's element, given the arguments of a function in ``Dataset.map``."""
    if not isinstance(dataset.element_spec, tuple):
        return arguments[0]
    return tf.nest.pack_sequence_as(dataset.element_spec, tf.nest.flatten(arguments))
