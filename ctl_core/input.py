"""The training data: global batches from one iterator, and the share of each replica in them.

In the graph each of the N x A shares, of N replicas and A micro-batches, takes its rows of a global
batch, whose numbers differ by one at most. So a batch that does not divide, a smaller last batch
and a resume on other devices are no cases of their own: a run is a function of the data, the seed
and the global batch. Where the batches come from is the part of batches.py. A process reads one
plain tf.data iterator, which a checkpoint can hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl_core.ahead import read_ahead
from ctl_core.batches import BatchSource, count_rows, static_rows
from ctl_core.cluster.strategy import distribute, local_replicas
from ctl_core.compat import drawing_from, global_seed_generator
from ctl_core.units import Units


@dataclasses.dataclass(frozen=True)
class Share:
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


class Input:
    """The endless stream of global batches of a run.

    Attributes:
        source: makes the dataset
        shape: of a global batch
        dataset: what ``iterator`` reads
        reader: the reader in Python that knows the position, if there is one
        iterator: its position; part of every checkpoint
        share_spec: of the batch of one share
        unit: how many batches are read at once, see units.py; 0: one by one
    """

    def __init__(self, strategy: tf.distribute.Strategy, source: BatchSource) -> None:
        """Begins to read when ``begin`` is called."""
        self.strategy, self.source, self.shape = strategy, source, source.shape
        self.dataset, self.reader = source.make(), source.reader
        self.iterator: Any = None
        self.unit = 0
        element = self.dataset.element_spec
        self.share_spec = (
            element if source.whole else tf.nest.map_structure(self._spec_of_share, element)
        )
        self._varies = not source.whole and static_rows(element) is None
        self._counted = _create_counter() if self._varies else None

    def _spec_of_share(self, spec: Any) -> Any:
        rows = static_rows(spec)
        shares = self.shape.shares
        size = rows // shares if rows is not None and rows % shares == 0 else None
        if isinstance(spec, tf.RaggedTensorSpec):
            inner = spec.shape[1:] if spec.shape.rank is not None else None
            shape = None if inner is None else [size, *inner]
            return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
        if spec.shape.rank in (0, None):
            return spec
        return type(spec)([size, *spec.shape[1:]], spec.dtype)

    def draw(self) -> tuple[Callable[[Any], Any], Any]:
        """Draws a global batch, inside a graph function.

        Returns:
            A function that deals out the micro-batch of an index, the fields of a ``Share`` with a
            value for each replica of this process; and how many examples the global batch has,
            a number or an int32 tensor.
        """
        local, replicas = local_replicas(self.strategy), self.shape.replicas
        first = first_replica(self.strategy)

        if self.source.whole:

            def deal_elements(_: Any) -> Any:
                elements = [next(self.iterator) for _ in range(replicas)]
                own = [Share(element) for element in elements[first : first + local]]
                return distribute_shares(self.strategy, own)

            return deal_elements, self.shape.batch

        batch = next(self.iterator)
        rows = static_rows(self.dataset.element_spec)
        examples = count_rows(batch) if rows is None else rows
        if self._counted is not None:
            self._counted.assign_add(tf.cast(examples, tf.int64))

        def deal_rows(micro_batch: Any) -> Any:
            numbers = [micro_batch * replicas + first + replica for replica in range(local)]
            shares = self.shape.shares
            own = [take_share(batch, examples, i, shares, replicas) for i in numbers]
            return distribute_shares(self.strategy, own)

        return deal_rows, examples

    def count_examples(self, steps: int) -> int:
        """Returns how many examples so many steps had, since it was last asked."""
        examples = steps * self.shape.batch
        if self._counted is not None:
            examples = int(self._counted.numpy())
            self._counted.assign(0)
        if self.reader is not None:
            self.reader.note_used(examples)
        return examples

    def begin(self, unit: int = 0) -> None:
        """Begins to read; ``unit`` batches at once where that is not 0."""
        self.unit = unit
        if unit:
            self.iterator = Units(self.dataset, unit)
        else:
            self.iterator = iter(read_ahead(self.dataset, for_long=True))

    def begin_anew(self) -> None:
        """Reads the data from their start, by another iterator."""
        with drawing_from(global_seed_generator()):
            self.dataset, self.reader = self.source.make(), self.source.reader
        self.begin(self.unit)

    def skip(self, examples: int) -> None:
        """Reads and drops so many examples: the way to a position that could not be saved."""
        if self.source.whole:
            steps = examples // self.shape.batch * self.shape.shares
            _skip_elements(self.iterator, tf.constant(steps, tf.int64))
        else:
            _skip_rows(self.iterator, tf.constant(examples, tf.int64))
        if self.reader is not None:
            self.reader.note_used(examples)


def distribute_shares(strategy: tf.distribute.Strategy, shares: list[Share]) -> tuple[Any, ...]:
    """Returns the fields of a ``Share``, each with a value for each replica of this process."""
    names = [field.name for field in dataclasses.fields(Share)]
    fields = [[getattr(share, name) for share in shares] for name in names]
    return tuple(None if one[0] is None else distribute(strategy, one) for one in fields)


def take_share(batch: Any, examples: Any, index: Any, shares: int, replicas: int) -> Share:
    """Returns the rows of one of many shares of a global batch.

    Args:
        batch: a structure of tensors, of which each has a row for each example, or is a scalar
        examples: how many there are; an int where that is fixed, otherwise an int32 tensor
        index: of the share, an int or an int32 tensor
        shares: how many there are
        replicas: to how many of them a micro-batch belongs
    """
    if shares == 1:
        return Share(batch)
    even = isinstance(examples, int) and examples % shares == 0
    size, more = examples // shares, examples % shares
    first = index * size  # those with a row more come first, those without any last
    if not even:
        first = first + tf.minimum(index, more)
        size = size + tf.cast(index < more, tf.int32)
    sure = isinstance(examples, int) and examples >= shares
    rows = together = None
    if not even:
        rows = tf.convert_to_tensor(size)
        before = index - index % replicas  # shares of earlier micro-batches
        together = examples // shares * replicas + tf.clip_by_value(more - before, 0, replicas)
    present = None if sure else tf.convert_to_tensor(size > 0)
    if not sure:  # a stand-in
        size = tf.maximum(size, 1)
        first = tf.minimum(first, examples - size)
    part = tf.nest.map_structure(lambda tensor: take_rows(tensor, first, size), batch)
    return Share(part, rows, present, together)


def take_rows(tensor: Any, first: Any, size: Any) -> Any:
    """Returns so many rows of a tensor from ``first`` on; a scalar is that of all rows."""
    if isinstance(tensor, tf.SparseTensor):
        start = tf.one_hot(0, tensor.shape.rank, tf.cast(first, tf.int64), dtype=tf.int64)
        rows = tf.cast(tf.reshape(size, [1]), tf.int64)
        return tf.sparse.slice(tensor, start, tf.concat([rows, tensor.dense_shape[1:]], 0))
    if tensor.shape.rank == 0:
        return tensor
    part = tensor[first : first + size]
    if isinstance(size, int) and not isinstance(tensor, tf.RaggedTensor):
        part = tf.ensure_shape(part, [size, *tensor.shape[1:]])
    return part


def _create_counter() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="examples")


def first_replica(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of the first of this process's replicas, among those of all processes."""
    resolver = strategy.cluster_resolver
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or resolver is None:
        return 0
    before = "chief" in resolver.cluster_spec().jobs and resolver.task_type == "worker"
    return (int(resolver.task_id) + int(before)) * local_replicas(strategy)


@tf.function(autograph=False)
def _skip_elements(iterator: Any, count: tf.Tensor) -> None:
    def drop(done: tf.Tensor) -> tuple[tf.Tensor]:
        next(iterator)
        return (done + 1,)

    tf.while_loop(lambda done: done < count, drop, (tf.constant(0, tf.int64),))


@tf.function(autograph=False)
def _skip_rows(iterator: Any, count: tf.Tensor) -> None:
    def drop(done: tf.Tensor) -> tuple[tf.Tensor]:
        return (done + tf.cast(count_rows(next(iterator)), tf.int64),)

    tf.while_loop(lambda done: done < count, drop, (tf.constant(0, tf.int64),))
