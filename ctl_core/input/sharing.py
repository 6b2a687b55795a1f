"""Turns the elements of the training data into global batches, and global batches into shares.

There are four ways to do this. Each is implemented by one class:

- ``JoinedRows``: elements are joined and cut into global batches. A share consists of rows of a
  global batch.
- ``FixedBatches``: each element is already a global batch, and a share consists of its rows. This
  is for tensors whose width differs between elements, because such elements cannot be joined.
- ``ReadyShares``: each element is the share of one replica. This is for data such as graphs and
  point sets: an example may have any number of rows, and the hook ``count_examples`` returns the
  number of examples in an element.
- ``OwnRows``: after ``ctl.data.own_rows``, elements contain only the rows of this process. They are
  joined to the process's rows of each global batch (see own_rows.py).

``choose_sharing`` chooses the class based on the values that ``count_examples`` returns. The source
code of this hook plays no role.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import ClassVar

import tensorflow as tf

from ctl_core.hooks.defaults import DifferentRowsError, explain_different_rows, leading_dimension
from ctl_core.hooks.hooks import Hook, Hooks, describe
from ctl_core.input.batches import (
    BatchShape,
    LocatedBatch,
    Share,
    count_pass_batches,
    count_rows,
    has_varying_widths,
    list_sizes,
    make_placeholders,
    pack_elements,
    set_rows,
    take_share,
    unpack_arguments,
)
from ctl_core.input.data_hooks import DataHooks, HookedData
from ctl_core.input.own_rows import Mark, PreparedRows, RowSelection
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.run.errors import HookFailed, SetupError
from ctl_core.run.settings import Config
from ctl_core.types import Batch, BatchSpec, Count

# A part of the error message of ``rebatch`` for an element whose tensors differ in their first
# dimension.
_REBATCH_FAILED = "must have the same batch size in each component"
_CONTRADICTED = "count_examples contradicts the first element"


class Sharing(abc.ABC):
    """Base class of the ways to turn elements into the shares of replicas.

    Attributes:
        by_rows: whether elements have one row per example, so that a share consists of rows
        elements_per_batch: the number of elements in a global batch; None if elements are joined
            and cut into global batches
        per_replica_batch_size: the argument of this name that is passed to the data hooks
    """

    by_rows: ClassVar[bool] = True
    elements_per_batch: int | None = None

    def __init__(self, shape: BatchShape, keeps_last_batch: bool, count_examples: Hook) -> None:
        """Stores the sizes of batches.

        Args:
            shape: the shape of a global batch
            keeps_last_batch: whether a pass may end with a smaller batch
            count_examples: the hook ``count_examples``
        """
        self.shape = shape
        self.per_replica_batch_size = shape.batch
        self._keeps_last_batch = keeps_last_batch
        self._count_examples = count_examples

    @abc.abstractmethod
    def make_batches(self, dataset: tf.data.Dataset, is_endless: bool) -> tf.data.Dataset:
        """Returns a dataset of one pass, which contains global batches or shares.

        Args:
            dataset: the dataset that the hooks returned
            is_endless: whether the dataset is endless
        """

    @abc.abstractmethod
    def count_used(self, element: Batch) -> int:
        """Returns the number of examples that steps use from an element.

        Args:
            element: a structure of arrays, as returned by a reader
        """

    def find_number_of_steps(self, dataset: tf.data.Dataset) -> int | None:
        """Returns the number of steps in a pass, or None if the pass must be read to count them."""
        return None

    def find_fixed_size(self, spec: BatchSpec) -> int | None:
        """Returns the number of examples in each global batch, or None if batches vary in size."""
        for tensor_spec in tf.nest.flatten(spec):
            if tensor_spec.shape.rank:
                rows: int | None = tensor_spec.shape[0]
                return rows
        return None

    def make_share_spec(self, spec: BatchSpec) -> BatchSpec:
        """Returns the specification of a share.

        Args:
            spec: the specification of the elements of ``make_batches``
        """
        examples = self.find_fixed_size(spec) or 0
        rows, remainder = divmod(examples, self.shape.leaves)
        fixed_rows = None
        if rows > 0 and remainder == 0:
            fixed_rows = rows
        return tf.nest.map_structure(lambda tensor_spec: set_rows(tensor_spec, fixed_rows), spec)

    def draw(self, read: Callable[[], Batch]) -> Batch | None:
        """Draws a global batch, or returns None if ``take_shares`` draws the shares one by one.

        Args:
            read: a function that draws an element of ``make_batches``
        """
        return read()

    def locate(self, drawn: Batch | None, fixed_size: int | None) -> LocatedBatch:
        """Returns where the rows of a result of ``draw`` are in the global batch.

        Args:
            drawn: the result of ``draw``
            fixed_size: the result of ``find_fixed_size``
        """
        return LocatedBatch(drawn, fixed_size or count_rows(drawn))

    def list_compared(self, element: Batch) -> Batch:
        """Returns the tensors of an element that must be the same on all processes."""
        return element

    def take_shares(
        self,
        batch: LocatedBatch,
        micro_batch: Count,
        replicas: range,
        read: Callable[[], Batch],
    ) -> list[Share]:
        """Returns the shares of this process's replicas in a micro-batch.

        Args:
            batch: the result of ``locate``
            micro_batch: the index of the micro-batch
            replicas: the indices of this process's replicas among the replicas of all processes
            read: a function that draws an element of ``make_batches``
        """
        shape = self.shape
        shares = []
        for replica in replicas:
            leaf = shape.find_leaf(replica, micro_batch)
            share = take_share(batch.rows, batch.examples, leaf, shape.leaves, batch.first_row)
            if share.rows is not None:
                together = shape.count_rows_of_round(micro_batch, batch.examples)
                share = share._replace(together=together)
            shares.append(share)
        return shares


class JoinedRows(Sharing):
    """Joins elements, which may have any number of rows, and cuts them into global batches."""

    def make_batches(self, dataset: tf.data.Dataset, is_endless: bool) -> tf.data.Dataset:
        """Returns a dataset of the global batches of one pass."""
        batches = dataset.rebatch(self.shape.batch, drop_remainder=not self._keeps_last_batch)
        # ``rebatch`` checks that all tensors of an element have the same number of rows. For the
        # default of ``count_examples``, no other check is necessary.
        if self._count_examples.is_default:
            return batches
        return check_counts(batches, self._count_examples)

    def count_used(self, element: Batch) -> int:
        """Returns the number of rows of an element."""
        return _count_array_rows(element)

    def find_number_of_steps(self, dataset: tf.data.Dataset) -> int | None:
        """Returns the number of steps in a pass, if TensorFlow knows the number of examples."""
        examples = int(dataset.unbatch().cardinality())
        if examples < 0:
            return None
        return count_pass_batches(examples, self.shape.batch, self._keeps_last_batch)


class FixedBatches(Sharing):
    """Uses each element as a global batch.

    Elements of another size are dropped, unless smaller batches are kept at the end of a pass.
    """

    elements_per_batch = 1

    def make_batches(self, dataset: tf.data.Dataset, is_endless: bool) -> tf.data.Dataset:
        """Returns a dataset of the global batches of one pass."""
        if self._keeps_last_batch:
            return check_counts(dataset, self._count_examples)

        def is_full(*element: Batch) -> tf.Tensor:
            batch = unpack_arguments(dataset, element)
            with check_count(self._count_examples, batch):
                return tf.equal(count_rows(batch), self.shape.batch)

        # All elements are full batches, so ``rebatch`` does not change them. It only adds the batch
        # size to the specification of the dataset.
        return dataset.filter(is_full).rebatch(self.shape.batch, drop_remainder=True)

    def count_used(self, element: Batch) -> int:
        """Returns the number of rows of an element; 0 if the element is dropped."""
        rows = _count_array_rows(element)
        if self._keeps_last_batch or rows == self.shape.batch:
            return rows
        return 0


class ReadyShares(Sharing):
    """Uses each element as the share of one replica. All shares have the same number of examples.

    Elements with another number of examples are dropped. If the last elements of a pass are too few
    for a global batch, they are dropped, too.
    """

    by_rows = False

    def __init__(self, shape: BatchShape, keeps_last_batch: bool, count_examples: Hook) -> None:
        super().__init__(shape, keeps_last_batch, count_examples)
        self.per_replica_batch_size = shape.per_replica
        self.elements_per_batch = shape.leaves

    def make_batches(self, dataset: tf.data.Dataset, is_endless: bool) -> tf.data.Dataset:
        """Returns a dataset of the shares of one pass."""
        shares = self.shape.leaves

        def is_full(*element: Batch) -> tf.Tensor:
            count = self._count_examples.trace(batch=unpack_arguments(dataset, element))
            return tf.equal(tf.cast(count, tf.int64), self.shape.per_replica)

        def join_windows(*windows: tf.data.Dataset) -> tf.data.Dataset:
            return tf.data.Dataset.zip(unpack_arguments(dataset, windows))

        full = dataset.filter(is_full)
        if shares == 1 or is_endless:
            return full
        return full.window(shares, drop_remainder=True).flat_map(join_windows)

    def count_used(self, element: Batch) -> int:
        """Returns the number of examples in an element; 0 if the element is dropped."""
        with tf.device("CPU:0"):
            batch = tf.nest.map_structure(tf.constant, element)
            examples = int(self._count_examples.trace(batch=batch))
        if examples == self.shape.per_replica:
            return examples
        return 0

    def find_fixed_size(self, spec: BatchSpec) -> int | None:
        """Returns the global batch size, because all global batches have the same size."""
        return self.shape.batch

    def make_share_spec(self, spec: BatchSpec) -> BatchSpec:
        """Returns the specification of an element, because each element is a share."""
        return spec

    def draw(self, read: Callable[[], Batch]) -> Batch | None:
        """Draws the shares of all logical replicas. Without logical replicas, draws nothing.

        A device computes its logical replicas one after another. Therefore, all shares are drawn
        beforehand, in order, and packed into one tensor (see ``pack_elements``). Without logical
        replicas, ``take_shares`` draws the shares.
        """
        if self.shape.logical_replicas is None:
            return None
        with tf.device("CPU:0"):
            return pack_elements([read() for _ in range(self.shape.logical_replicas)])

    def take_shares(
        self,
        batch: LocatedBatch,
        micro_batch: Count,
        replicas: range,
        read: Callable[[], Batch],
    ) -> list[Share]:
        """Draws the shares of a micro-batch.

        The shares of the replicas of other processes are read, too, but they are not used.
        """
        shape = self.shape
        shares = [
            Share(read(), leaf=shape.find_leaf(replica, micro_batch))
            for replica in range(shape.replicas)
        ]
        return [shares[replica] for replica in replicas]


class OwnRows(Sharing):
    """Joins the rows that this process has prepared after ``ctl.data.own_rows``.

    Attributes:
        selection: selects the rows of this process
        examples: the number of examples in a pass; None if they are endless, or not known
    """

    def __init__(
        self,
        shape: BatchShape,
        selection: RowSelection,
        examples: int | None,
        count_examples: Hook,
    ) -> None:
        super().__init__(shape, selection.keeps_last_batch, count_examples)
        self.selection = selection
        self.examples = examples
        self._has_fixed_size = not selection.has_batches_of_several_sizes(examples)

    def start_at(self, batches: int) -> OwnRows:
        """Returns the sharing of a run that has used the first ``batches`` global batches."""
        selection = dataclasses.replace(self.selection, start=batches)
        return OwnRows(self.shape, selection, self.examples, self._count_examples)

    def make_batches(self, dataset: tf.data.Dataset, is_endless: bool) -> tf.data.Dataset:
        """Returns an endless dataset of the process's rows in each global batch."""
        return self._join(dataset, self.selection)

    def make_global_batches(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns an endless dataset of global batches.

        Args:
            dataset: the dataset that the hooks returned for all rows
        """
        return self._join(dataset, self.selection.select_all())

    def _join(self, dataset: tf.data.Dataset, selection: RowSelection) -> tf.data.Dataset:
        if not self._count_examples.is_default:
            dataset = check_counts(dataset, self._count_examples)
        return selection.join_rows(dataset, self.examples)

    def count_used(self, element: Batch) -> int:
        """Not called, because the dataset is not read by a reader."""
        raise NotImplementedError

    def find_number_of_steps(self, dataset: tf.data.Dataset) -> int | None:
        """Returns the number of steps in a pass, if the number of examples is known."""
        if self.examples is None:
            return None
        return self.selection.count_steps(self.examples)

    def find_fixed_size(self, spec: BatchSpec) -> int | None:
        """Returns the number of examples in each global batch, or None if batches vary in size."""
        if self._has_fixed_size:
            return self.shape.batch
        return None

    def make_share_spec(self, spec: BatchSpec) -> BatchSpec:
        """Returns the specification of a share."""
        if isinstance(spec, PreparedRows):
            spec = spec.rows
        return super().make_share_spec(spec)

    def locate(self, drawn: Batch | None, fixed_size: int | None) -> LocatedBatch:
        """Returns where the rows of this process are in the global batch."""
        if self.selection.has_all_rows:
            return super().locate(drawn, fixed_size)
        if isinstance(drawn, PreparedRows):
            first, _ = self.selection.find_rows(drawn.examples)
            return LocatedBatch(drawn.rows, drawn.examples, first)
        first, _ = self.selection.find_rows(self.shape.batch)
        return LocatedBatch(drawn, self.shape.batch, first)

    def list_compared(self, element: Batch) -> Batch:
        """Returns the sizes of an element, because processes prepare different rows."""
        if self.selection.has_all_rows:
            return element
        return list_sizes(element, self.shape.batch)


def choose_sharing(
    data_hooks: DataHooks, hooks: Hooks, shape: BatchShape, config: Config
) -> tuple[Sharing, HookedData]:
    """Chooses how elements become shares, based on ``count_examples`` of the first element.

    If the hook returns the first dimension that all tensors of the element have, each row is an
    example. Otherwise, each element is a share. If the shapes in the specification are sufficient
    for this decision, no element is read.

    Returns:
        The chosen sharing, and the data that the hooks returned for it. No element of these data
        has been read yet.

    Raises:
        SetupError: the elements are not batches, or have the wrong number of examples.
    """
    hook = hooks.count_examples
    keeps_last_batch = config.keeps_last_batch
    data = data_hooks.call(shape.batch, selection=data_hooks.selection)
    spec = data.dataset.element_spec
    by_rows = counts_rows_of_spec(hook, data.hook, spec, shape.batch)
    element: Batch | None = None
    if by_rows is None or has_varying_widths(spec):
        element = data_hooks.read_first(data, shape.batch)
        by_rows = element is None or counts_rows(hook, data.hook, spec, element, shape.batch)
    if data.mark is not None:
        if not by_rows:
            raise data.hook.reject(
                "calls ctl.data.own_rows, but count_examples does not count the rows of its "
                "elements, so each element would be a share; leave out own_rows."
            )
        examples = _count_marked_examples(data_hooks, data.mark, config)
        return OwnRows(shape, data_hooks.selection, examples, hook), data
    if by_rows:
        is_batch = element is not None and int(count_rows(element)) == shape.batch
        if has_varying_widths(spec) and is_batch:
            return FixedBatches(shape, keeps_last_batch, hook), data
        return JoinedRows(shape, keeps_last_batch, hook), data
    if shape.leaves > 1:
        data = data_hooks.call(shape.per_replica, data.reader)
        element = data_hooks.read_first(data, shape.per_replica)
    size = 0
    if element is not None:
        size = read_count(hook, element) or 0
    if size * shape.leaves != shape.batch:
        raise data.hook.reject(
            f"returned elements of {size} examples, expected {shape.batch} / {shape.leaves}: "
            "since count_examples does not count rows, each element is the share of one replica; "
            "batch by per_replica_batch_size."
        )
    return ReadyShares(shape, keeps_last_batch, hook), data


def _count_marked_examples(data_hooks: DataHooks, mark: Mark, config: Config) -> int | None:
    """Returns the number of examples in a pass before ``ctl.data.own_rows``.

    Returns None if they are endless, or if they would have to be counted but nothing needs the
    number.
    """
    examples = mark.find_number_of_examples()
    if examples is not None or mark.is_endless:
        return examples
    if not (config.keeps_last_batch or config.counts_epochs):
        return None
    with keep_seeds():
        inspected = data_hooks.call(data_hooks.selection.batch).mark
    assert inspected is not None
    return inspected.count_examples()


def counts_rows_of_spec(
    count_examples: Hook, data_hook: Hook, spec: BatchSpec, examples: int
) -> bool | None:
    """Returns True if ``count_examples`` counts the rows of every element; None if this is unknown.

    Args:
        count_examples: the hook ``count_examples``
        data_hook: the hook that returned the elements
        spec: the specification of elements
        examples: the number of examples that an element should have

    Raises:
        SetupError: the user has not defined ``count_examples``, and the tensors of an element do
            not have the same number of rows.
    """
    if not count_examples.is_default:
        if has_fixed_count(count_examples, spec):
            return True
        return None
    if has_several_sizes(spec, examples):
        raise data_hook.reject(f"{explain_different_rows(spec, examples)}.")
    if not may_have_rows(spec):
        raise reject_elements(data_hook, spec)
    return True


def has_several_sizes(spec: BatchSpec, examples: int) -> bool:
    """Returns whether some tensors have ``examples`` rows, and others a multiple of this number."""
    sizes = _list_sizes(spec)
    if None in sizes or len(sizes) < 2 or has_scalars(spec):
        return False
    return examples in sizes and all(size % examples == 0 for size in sizes if size is not None)


def may_have_rows(spec: BatchSpec) -> bool:
    """Returns False if the tensors of an element cannot have the same number of rows.

    This is the case if their shapes differ in the first dimension, or if all tensors are scalars.
    """
    sizes = _list_sizes(spec)
    return bool(sizes) and len(sizes - {None}) <= 1 and not has_scalars(spec)


def has_scalars(spec: BatchSpec) -> bool:
    """Returns True if elements have a scalar, such as the label of a single example."""
    shapes = [tensor_spec.shape for tensor_spec in tf.nest.flatten(spec)]
    return any(shape.rank == 0 for shape in shapes)


def has_fixed_count(count_examples: Hook, spec: BatchSpec) -> bool:
    """Returns whether the shapes prove that ``count_examples`` counts the rows of each element."""
    sizes = _list_sizes(spec)
    if len(sizes) != 1 or None in sizes:
        return False
    with tf.Graph().as_default():
        count = count_examples.trace(batch=make_placeholders(spec))
        if count is None:
            return False
        static_count = tf.get_static_value(tf.convert_to_tensor(count))
    return static_count is not None and int(static_count) in sizes


def _list_sizes(spec: BatchSpec) -> set[int | None]:
    """Returns the first dimensions of an element's tensors; empty if a value is not a tensor."""
    sizes: set[int | None] = set()
    for tensor_spec in tf.nest.flatten(spec):
        if not hasattr(tensor_spec, "shape"):
            return set()
        if tensor_spec.shape.rank is None:
            sizes.add(None)
        elif tensor_spec.shape.rank > 0:
            sizes.add(tensor_spec.shape[0])
    return sizes


def counts_rows(
    count_examples: Hook, data_hook: Hook, spec: BatchSpec, element: Batch, examples: int
) -> bool:
    """Returns whether ``count_examples`` returns the number of rows that all tensors have.

    Args:
        count_examples: the hook ``count_examples``
        data_hook: the hook that returned the element
        spec: the specification of elements
        element: the first element
        examples: the number of examples that the element should have

    Raises:
        SetupError: ``count_examples`` cannot count the examples of the element.
    """
    count = read_count(count_examples, element)
    if count is None or (count < 0 and not may_have_rows(spec)):
        raise reject_elements(data_hook, spec)
    if count < 0:
        raise data_hook.reject(f"{explain_different_rows(element, examples)}.")
    return count == read_rows(element)


def read_count(count_examples: Hook, element: Batch) -> int | None:
    """Calls ``count_examples`` for an element.

    Returns:
        The number of examples; -1 if the tensors differ in their number of rows; None if the hook
        returns None, as the default does for an element that has only scalars.
    """
    try:
        count = count_examples.trace(batch=element)
    except HookFailed as error:
        if isinstance(error.__cause__, DifferentRowsError):
            return -1
        raise
    if count is None:
        return None
    return int(count)


def read_rows(element: Batch) -> int | None:
    """Returns the number of rows of an element; None if its tensors differ or are all scalars."""
    try:
        rows = leading_dimension(element)
    except DifferentRowsError:
        return None
    if rows is None or int(rows) < 0:
        return None
    return int(rows)


def reject_elements(data_hook: Hook, spec: BatchSpec) -> SetupError:
    """Returns the error for elements that are not batches."""
    return data_hook.reject(
        f"returned elements {describe(spec)}, expected batches of tensors with one row per "
        "example: use dataset.batch(global_batch_size), or write count_examples."
    )


def check_counts(dataset: tf.data.Dataset, count_examples: Hook) -> tf.data.Dataset:
    """Adds a check that ``count_examples`` counts the rows of each element in a dataset.

    Reading the dataset fails at an element for which the hook returns another number.
    """
    if has_fixed_count(count_examples, dataset.element_spec):
        return dataset

    def check(*element: Batch) -> Batch:
        batch = unpack_arguments(dataset, element)
        with check_count(count_examples, batch):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    return dataset.map(check)


def check_count(count_examples: Hook, batch: Batch) -> contextlib.AbstractContextManager[object]:
    """Returns a context whose ops fail if ``count_examples`` does not count the rows of a batch."""
    examples = leading_dimension(batch)
    assert examples is not None  # the rows are examples, so there are tensors with rows
    rows = tf.cast(examples, tf.int64)
    count = tf.cast(count_examples.trace(batch=batch), tf.int64)
    agree = tf.logical_and(tf.equal(count, rows), rows >= 0)
    return tf.control_dependencies([tf.debugging.Assert(agree, [_CONTRADICTED])])


def is_contradiction(error: BaseException) -> bool:
    """Returns whether an op failed because the examples of an element are not its rows."""
    return any(text in str(error) for text in (_REBATCH_FAILED, _CONTRADICTED))


def explain_contradiction(count_examples: Hook, elements: Iterable[Batch], examples: int) -> str:
    """Explains the error of an element whose examples are not its rows.

    The examples of the first element of the dataset were its rows, so the engine has assumed this
    for all elements. The explanation describes the first element that contradicts this.

    Args:
        count_examples: the hook ``count_examples``
        elements: the elements of the dataset, from the start
        examples: the number of examples that each element should have
    """
    for element in elements:
        count = read_count(count_examples, element)
        rows = read_rows(element)
        if count is not None and count >= 0 and count != rows:
            return (
                f"count_examples returns {count} for {describe(element)}, but counted the rows of "
                "the first element, so that elements are joined by rows. Count rows, or begin with "
                "an element in which the two differ"
            )
        if rows is None:
            return explain_different_rows(element, examples)
    return explain_different_rows(())


def _count_array_rows(element: Batch) -> int:
    return len(next(array for array in tf.nest.flatten(element) if array.ndim))
