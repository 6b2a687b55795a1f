"""A global batch: how many examples it holds, and the share that each replica has in it.

Each of the N x A shares, of N replicas and A micro-batches, has rows whose numbers differ by one at
most. So a batch that does not divide, a smaller last batch and a resume on other devices are no
cases of their own: a run is a function of the data, the seed and the global batch.
"""

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from ctl_core.cluster.collectives import count_local_replicas, distribute
from ctl_core.hooks.defaults import get_first_dimension


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """How a global batch is shared out.

    Attributes:
        batch: examples in a global batch, B
        replicas: N, over all processes
        accumulate_steps: A
    """

    batch: int
    replicas: int
    accumulate_steps: int

    @property
    def shares(self) -> int:
        """N A, into which a global batch is cut."""
        return self.replicas * self.accumulate_steps

    @property
    def per_replica(self) -> int:
        """How many examples a share has, at least."""
        return max(1, self.batch // self.shares)

    def count_rows_of(self, replica: Any, examples: Any) -> tuple[Any, Any]:
        """Returns how many rows of a global batch a replica has, and whether there are any.

        Both are None where all replicas have as many.
        """
        if isinstance(examples, int) and examples % self.shares == 0:
            return None, None
        size, more = examples // self.shares, examples % self.shares
        with_more = tf.maximum(more - replica + self.replicas - 1, 0) // self.replicas
        rows = self.accumulate_steps * size + with_more
        return rows, rows > 0

    def count_rows_before(self, replica: Any, examples: Any) -> tf.Tensor:
        """Returns how many rows of a global batch the replicas before this one have, an int32."""
        replica = tf.cast(replica, tf.int32)
        replicas = tf.range(self.replicas)
        rows, _ = self.count_rows_of(replicas, examples)
        if rows is None:
            return replica * (examples // self.replicas)
        return tf.reduce_sum(tf.where(replicas < replica, tf.cast(rows, tf.int32), 0))


class Share(NamedTuple):
    """What one replica has of a micro-batch.

    Attributes:
        batch: its rows; a first row as a stand-in, which counts nowhere, where it has none
        rows: how many it has, an int32 scalar; None where all shares have as many
        present: whether it has any, a scalar bool; None where that is sure
        together: how many all replicas have of the micro-batch, an int32 scalar; None as ``rows``
    """

    batch: Any
    rows: tf.Tensor | None = None
    present: tf.Tensor | None = None
    together: tf.Tensor | None = None


def take_share(batch: Any, examples: Any, index: Any, shares: int, replicas: int) -> Share:
    """Returns the rows of one of many shares; those with a row more come first.

    Args:
        batch: a structure of tensors, of which each has a row for each example, or is a scalar
        examples: an int where their number is fixed, otherwise an int32 tensor
        index: of the share, an int or an int32 tensor
        shares: how many there are
        replicas: how many of them make a micro-batch
    """
    if shares == 1:
        return Share(batch)
    if isinstance(examples, int) and examples % shares == 0:
        size = examples // shares
        return Share(tf.nest.map_structure(lambda one: take_rows(one, index * size, size), batch))

    def start_of(share: Any) -> tf.Tensor:
        return share * (examples // shares) + tf.minimum(share, examples % shares)

    first = start_of(index)
    rows = size = start_of(index + 1) - first
    micro_batch = index - index % replicas
    together = start_of(micro_batch + replicas) - start_of(micro_batch)
    present = None
    if not isinstance(examples, int) or examples < shares:
        present = rows > 0
        size = tf.maximum(rows, 1)
        first = tf.minimum(first, examples - size)
    part = tf.nest.map_structure(lambda one: take_rows(one, first, size), batch)
    return Share(part, rows, present, together)


def distribute_shares(strategy: tf.distribute.Strategy, shares: list[Share]) -> Share:
    """Returns a share whose fields have a value for each replica of this process."""
    fields = map(list, zip(*shares, strict=True))
    return Share(*(None if one[0] is None else distribute(strategy, one) for one in fields))


def find_first_replica(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of the first of this process's replicas, among those of all processes."""
    resolver = strategy.cluster_resolver
    return int(resolver.task_id or 0) * count_local_replicas(strategy) if resolver else 0


def take_rows(tensor: Any, first: Any, size: Any) -> Any:
    """Returns so many rows of a tensor from ``first`` on; a scalar is that of all rows."""
    if isinstance(tensor, tf.SparseTensor):
        start = tf.one_hot(0, tensor.shape.rank, tf.cast(first, tf.int64), dtype=tf.int64)
        rows = tf.cast(tf.reshape(size, [1]), tf.int64)
        return tf.sparse.slice(tensor, start, tf.concat([rows, tensor.dense_shape[1:]], 0))
    if tensor.shape.rank == 0:
        return tensor
    if isinstance(size, int) and not isinstance(tensor, tf.RaggedTensor):
        rest = [-1 if length is None else length for length in tensor.shape[1:]]
        return tf.slice(tensor, [first, *(0 for _ in rest)], [size, *rest])
    return tensor[first : first + size]


def keep_rows_if(present: Any, values: Any) -> Any:
    """Returns what a replica has for hooks, without a row if those are of a stand-in."""

    def keep(value: Any) -> Any:
        if not tf.is_tensor(value) or not value.shape.rank:
            return value
        return take_rows(value, 0, tf.where(present, count_rows(value), 0))

    return tf.nest.map_structure(keep, values)


def count_rows(batch: Any) -> tf.Tensor:
    """Returns how many rows a batch has, an int32 scalar."""
    first = next(part for part in tf.nest.flatten(batch) if part.shape.rank != 0)
    return tf.cast(get_first_dimension(first), tf.int32)


def add_to_digest(digest: Any, batch: Any) -> tf.Tensor:
    """Returns a number that differs, all but surely, if sizes or first rows so far differed."""
    parts = tf.nest.flatten(batch, expand_composites=True)
    seen = [tf.io.serialize_tensor(part[:1] if part.shape.rank else part) for part in parts]
    seen += [tf.io.serialize_tensor(tf.shape(part)) for part in parts]
    return 31 * digest + tf.strings.to_hash_bucket_fast(tf.strings.join(seen), 2**40)


def has_varying_widths(spec: Any) -> bool:
    """Whether dense parts of elements may differ in more than their first dimension."""
    dense = [part for part in tf.nest.flatten(spec) if isinstance(part, tf.TensorSpec)]
    return any(part.shape.rank is None or None in part.shape[1:].as_list() for part in dense)


def set_rows(spec: Any, rows: int | None = None, name: str | None = None) -> Any:
    """Returns a specification of so many rows, of any number for None; a scalar's is as it was."""
    shape = [rows, *spec.shape[1:]] if spec.shape.rank else spec.shape
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype, name)


def make_placeholders(spec: Any) -> Any:
    """Returns a batch of a specification that has no values, in a graph."""
    return tf.nest.map_structure(
        lambda one: tf.compat.v1.placeholder(one.dtype, one.shape), spec, expand_composites=True
    )
