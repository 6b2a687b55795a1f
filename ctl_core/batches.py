"""From what the hooks return as data to one endless dataset of global batches.

``create_dataset`` may batch as it likes. Its elements are

- joined and cut into global batches (``Dataset.rebatch``), of which replicas take rows;
- global batches as they are, where their tensors differ in width, so that they cannot be joined,
  and each has the rows of one;
- shares as they are, one for each replica and micro-batch: graphs and point sets, which
  ``count_examples`` counts, what a ``make_batches`` of the user's returns, and padded batches of
  several widths that have the rows of one.

Iterators of one dataset share the state of its shuffles, so what has to be found out by reading is
found out on a dataset that is made for it, from the same seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checks.contract import describe
from ctl_core.compat import scratch_graph
from ctl_core.errors import brief
from ctl_core.hooks import Hook, Hooks
from ctl_core.readers.reader import Reader
from ctl_core.readers.sources import is_reader
from ctl_core.settings import Config


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
        """The largest divisor of B that is no more than a share: what hooks of the data batch by.

        A divisor, so that a remainder which a hook drops is what the global batches leave over.
        """
        most = max(1, self.batch // self.shares)
        return next(size for size in range(most, 0, -1) if self.batch % size == 0)

    def count_rows_of(self, replica: Any, examples: Any) -> tuple[Any, Any]:
        """Returns how many rows of a global batch a replica has in all of its micro-batches.

        Returns:
            The rows, and whether there are any; None, both, where all replicas have as many.
        """
        if isinstance(examples, int) and examples % self.shares == 0:
            return None, None
        size, more = examples // self.shares, examples % self.shares
        with_more = tf.maximum(more - replica + self.replicas - 1, 0) // self.replicas
        rows = self.accumulate_steps * size + with_more
        return rows, rows > 0


class BatchSource:
    """Makes the training data, each time as they are before anything was read from them.

    Attributes:
        shape: of a global batch
        per_replica_batch_size: what hooks of the data are given
        whole: whether each element is a share by itself
        endless: whether a pass has no end
        steps_per_epoch: global batches in a pass; None where there is no end, or nobody counted
        reader: knows the position of the dataset that was made last, if that can be saved by it
    """

    reader: Reader | None = None

    def __init__(
        self, hooks: Hooks, config: Config, shape: BatchShape, per_replica: int | None = None
    ) -> None:
        """Looks at what the hooks return.

        Args:
            hooks: ``create_dataset``, ``make_batches`` and ``count_examples``
            config: sizes and the seed, which is set before each time that the hooks are called
            shape: of a global batch
            per_replica: the ``per_replica_batch_size`` of the run's first start; default: of this

        Raises:
            SetupError: what they return is no dataset, or not batched as it should be.
        """
        self.shape = shape
        self.per_replica_batch_size = per_replica or shape.per_replica
        self._hooks, self._config = hooks, config
        self._read: Reader | None = None
        self._by_rows = hooks.count_examples.is_default
        self._own_batches = not hooks.make_batches.is_default
        self._hook = hooks.make_batches if self._own_batches else hooks.create_dataset
        dataset = self.call_hooks()
        self.endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        self.endless |= self._own_batches
        if self._by_rows:
            self._check_rows(dataset.element_spec)
        size = None
        if self._own_batches or not self._by_rows or widths_vary(dataset.element_spec):
            size = self._count_first(dataset)
        self._pass_as_is = size == shape.batch
        self.whole = self._are_shares(size)
        self._unread = dataset if size is None else None
        self.steps_per_epoch = self._count_steps()

    def call_hooks(self) -> tf.data.Dataset:
        """Returns what the hooks of the data return."""
        sizes = {
            "per_replica_batch_size": self.per_replica_batch_size,
            "global_batch_size": self.shape.batch,
            "input_context": tf.distribute.InputContext(1, 0, self.shape.replicas),
        }
        hooks = self._hooks
        keras.utils.set_random_seed(self._config.seed)
        made = hooks.create_dataset(**sizes)
        self._read = open_reader(
            hooks.create_dataset, made, lambda: hooks.create_dataset(**sizes), self._read
        )
        if self._read is not None:
            made = self._read.read_elements(endless=self._own_batches)
        dataset = check_dataset(hooks.create_dataset, made)
        if not self._own_batches:
            return dataset
        if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
            dataset = dataset.repeat()
        made = hooks.make_batches(dataset=dataset, **sizes)
        return check_dataset(hooks.make_batches, made)

    def make(self) -> tf.data.Dataset:
        """Returns the endless dataset whose elements are global batches, or shares."""
        dataset, self._unread = self._unread, None
        dataset = self.call_hooks() if dataset is None else dataset
        self.reader = None
        if self._read is not None and not self._own_batches:
            dataset = self._read_batches(self._read)
            self.reader = None if self._config.overfit_batches else self._read
        else:
            dataset = self._make_pass(dataset)
            dataset = dataset if self.endless else dataset.repeat()
        if number := self._config.overfit_batches:
            # Kept as they were read first: neither a shuffle nor noise makes others of them.
            elements = number * (self.shape.shares if self.whole else 1)
            return dataset.take(elements).cache().repeat()
        return dataset

    def _read_batches(self, reader: Reader) -> tf.data.Dataset:
        shape, whole = self.shape, self.whole
        keeps = self._config.keeps_last_batch and not whole

        def count(element: Any) -> int:
            tensors = tf.nest.map_structure(tf.constant, element)
            return int(self._hooks.count_examples.in_graph(batch=tensors))

        return reader.read_batches(
            shape.batch // shape.shares if whole else shape.batch,
            None if whole or keeps else shape.batch,
            shape.shares if whole else 1,
            keeps,
            count if whole or self._pass_as_is else None,
        )

    def count_pass(self) -> int:
        """Returns how many examples a pass has: read once more, after it had too few."""
        return sum(int(count_rows(element)) for element in self.call_hooks())

    def _make_pass(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns one pass of global batches, or of shares, of what the hooks returned."""
        shape, keeps = self.shape, self._config.keeps_last_batch
        if self._own_batches:
            return dataset
        if self.whole:
            return self._take_groups(dataset)
        if self._pass_as_is:
            return dataset if keeps else _take_whole(dataset, shape.batch)
        elements, rows = int(dataset.cardinality()), static_rows(dataset.element_spec)
        dataset = dataset.rebatch(shape.batch, drop_remainder=not keeps)
        if rows is None or elements < 0:
            return dataset
        number, rest = divmod(elements * rows, shape.batch)  # known without reading
        return dataset.apply(tf.data.experimental.assert_cardinality(number + (keeps and rest > 0)))

    def _count_steps(self) -> int | None:
        """Returns the steps of a pass, if anybody asks for them; they are read if need be."""
        config = self._config
        if config.overfit_batches:
            return config.overfit_batches
        if not config.counts_epochs or self.endless:
            return None
        elements = _count_elements(self._make_pass(self.call_hooks()))
        self._unread = None  # its shuffles have been read from
        steps = elements // (self.shape.shares if self.whole else 1)
        if steps == 0:
            raise self._hook.reject(describe_shortage(self.count_pass(), self.shape.batch))
        return steps

    def _are_shares(self, size: int | None) -> bool:
        """Returns whether elements of so many examples are shares by themselves.

        Raises:
            SetupError: they are neither shares nor global batches, and cannot be joined.
        """
        shape = self.shape
        fits = size is not None and size * shape.shares == shape.batch
        shared_out = size == shape.batch and (self._by_rows or shape.shares == 1)
        if (self._own_batches or not self._by_rows) and not (fits or shared_out):
            own = f"per_replica_batch_size, {shape.batch // shape.shares}, or "
            raise self._hook.reject(
                f"returned elements of {size} examples, expected {own * (shape.shares > 1)}"
                f"global_batch_size, {shape.batch}, which {shape.shares} share"
                f"{'s' * (shape.shares > 1)} of a step can divide."
            )
        return (fits and not shared_out) or not self._by_rows

    def _check_rows(self, spec: Any) -> None:
        """Refuses elements of which it is not clear how many examples they hold."""
        with scratch_graph("rows").as_default():
            element = make_placeholders(spec)
            try:
                rows = self._hooks.count_examples.in_graph(batch=element)
            except Exception as error:
                why = error.__cause__ or error
                raise self._hook.reject(f"returned elements {describe(element)}: {why}.") from error
        if rows is None:
            raise self._hook.reject(
                "returned single examples, expected batches: use "
                "dataset.batch(per_replica_batch_size)."
            )

    def _count_first(self, dataset: tf.data.Dataset) -> int:
        for element in dataset.take(1):
            return int(self._hooks.count_examples.in_graph(batch=element))
        raise self._hook.reject(describe_shortage(0, 1))

    def _take_groups(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Leaves out elements of another size than a share's, and those that fill no batch."""
        count, shares = self._hooks.count_examples, self.shape.shares

        def has_size(*parts: Any) -> tf.Tensor:
            element = parts if isinstance(dataset.element_spec, tuple) else parts[0]
            number = tf.cast(count.in_graph(batch=element), tf.int64)
            return tf.equal(number, self.shape.batch // shares)

        dataset = dataset.filter(has_size)
        if self.endless or shares == 1:
            return dataset
        return dataset.take(_count_elements(dataset) // shares * shares)


def open_reader(
    hook: Hook, made: Any, remake: Callable[[], Any], before: Reader | None = None
) -> Reader | None:
    """Returns a reader of what a hook made, the same one as before of the same object.

    Returns:
        None if it is no reader in Python.

    Raises:
        SetupError: it cannot be read.
    """
    if not is_reader(made):
        return None
    if before is not None and before.made is made:
        return before
    try:
        return Reader(made, remake)
    except Exception as error:
        raise hook.reject(f"reading the data: {brief(error)}") from error


def check_dataset(hook: Hook, made: Any) -> tf.data.Dataset:
    """Returns what a hook made.

    Raises:
        SetupError: it is no dataset.
    """
    if not isinstance(made, tf.data.Dataset):
        what = "nothing" if made is None else f"a {type(made).__name__}"
        raise hook.reject(f"returned {what}, expected a tf.data.Dataset, or a reader.")
    return made


def make_placeholders(spec: Any) -> Any:
    """Returns a batch of a specification that has no values, in a graph."""
    return tf.nest.map_structure(
        lambda one: tf.compat.v1.placeholder(one.dtype, one.shape), spec, expand_composites=True
    )


def widths_vary(spec: Any) -> bool:
    """Whether dense parts of elements may differ in more than their first dimension."""
    dense = [part for part in tf.nest.flatten(spec) if isinstance(part, tf.TensorSpec)]
    return any(part.shape.rank is None or None in part.shape[1:].as_list() for part in dense)


def describe_shortage(examples: int, batch: int) -> str:
    """Says, after the name of the hook, that a pass has less than one global batch."""
    if not examples:
        return "returned an empty dataset, or one with fewer examples than its own batches hold."
    return (
        f"returned {examples} examples, fewer than one global batch of {batch}; lower --batch-size."
    )


def _take_whole(dataset: tf.data.Dataset, rows: int) -> tf.data.Dataset:
    """Leaves out elements of another number of rows."""

    def pack(parts: tuple[Any, ...]) -> Any:
        return parts if isinstance(dataset.element_spec, tuple) else parts[0]

    def has_rows(*parts: Any) -> tf.Tensor:
        return tf.equal(count_rows(pack(parts)), rows)

    return dataset.filter(has_rows).map(lambda *parts: _fix_rows(pack(parts), rows))


def _count_elements(dataset: tf.data.Dataset) -> int:
    """Returns how many elements a pass has; they are read if nothing says so."""
    known = int(dataset.cardinality())
    if known >= 0:
        return known
    return int(dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))


def static_rows(spec: Any) -> int | None:
    """Returns the first dimension of a structure's tensors or specs, if it is fixed."""
    for part in tf.nest.flatten(spec):
        if part.shape.rank:
            return part.shape[0]
    return None


def count_rows(batch: Any) -> tf.Tensor:
    """Returns how many rows a batch has, an int32 scalar."""
    for part in tf.nest.flatten(batch):
        if isinstance(part, tf.RaggedTensor):
            return tf.cast(part.nrows(), tf.int32)
        if isinstance(part, tf.SparseTensor):
            return tf.cast(part.dense_shape[0], tf.int32)
        if part.shape.rank != 0:
            return tf.shape(part)[0]
    raise AssertionError("single examples are refused")


def cut_unless(present: Any, values: Any) -> Any:
    """Returns what a replica has for hooks, without a row if those are of a stand-in."""

    def cut(value: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            rows = tf.where(present, value.dense_shape[:1], 0)
            size = tf.concat([rows, value.dense_shape[1:]], 0)
            return tf.sparse.slice(value, tf.zeros_like(size), size)
        if not tf.is_tensor(value) or not value.shape.rank:
            return value
        rows = value.nrows() if isinstance(value, tf.RaggedTensor) else tf.shape(value)[0]
        return value[: tf.where(present, rows, 0)]

    return tf.nest.map_structure(cut, values)


def _fix_rows(batch: Any, rows: int) -> Any:
    def fix(part: Any) -> Any:
        if isinstance(part, tf.Tensor) and part.shape.rank:
            return tf.ensure_shape(part, [rows, *part.shape[1:]])
        return part

    return tf.nest.map_structure(fix, batch)
