"""How the elements of the training data become global batches, and these become shares.

There are three ways, one class each:

- ``JoinedRows``: elements are joined and cut into global batches, of which each replica takes rows;
- ``FixedBatches``: elements are global batches already. Their tensors differ in width from element
  to element, so that elements cannot be joined; each replica takes rows;
- ``ReadyShares``: each element is the share of one replica. Graphs and point sets are of this kind:
  an example has any number of rows, and ``count_examples`` says how many examples there are.

``choose_sharing`` chooses by the values that ``count_examples`` returns, never by how that function
is written.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable
from typing import ClassVar, cast

import tensorflow as tf

from ctl_core.hooks.defaults import DifferentRowsError, explain_different_rows, leading_dimension
from ctl_core.hooks.hooks import Hook, Hooks, describe
from ctl_core.input.batches import (
    BatchShape,
    Share,
    count_rows,
    has_varying_widths,
    make_placeholders,
    pack_elements,
    set_rows,
    take_share,
)
from ctl_core.input.data_hooks import DataHooks, HookedData
from ctl_core.run.errors import HookFailed, SetupError
from ctl_core.types import Batch, BatchSpec, Count, Structure

# TensorFlow's message when elements are joined whose tensors differ in their first dimension.
_REBATCH_FAILED = "must have the same batch size in each component"
_CONTRADICTED = "count_examples contradicts the first element"


class Sharing(abc.ABC):
    """A way in which elements become the shares of replicas.

    Attributes:
        by_rows: whether elements have a row for each example, and a share is some rows of a batch
        elements_per_batch: the number of elements that a global batch is made of; None if elements
            are joined
        per_replica_batch_size: the argument that the hooks of the data are given
    """

    by_rows: ClassVar[bool] = True
    elements_per_batch: int | None = None

    def __init__(self, shape: BatchShape, keeps_last_batch: bool, count_examples: Hook) -> None:
        """Stores the sizes of batches.

        Args:
            shape: the shape of a global batch
            keeps_last_batch: whether a pass may end with a smaller batch
            count_examples: the hook
        """
        self.shape = shape
        self.per_replica_batch_size = shape.batch
        self._keeps_last_batch = keeps_last_batch
        self._count_examples = count_examples

    @abc.abstractmethod
    def make_batches(self, dataset: tf.data.Dataset, is_endless: bool) -> tf.data.Dataset:
        """Returns one pass of global batches, or of shares."""

    @abc.abstractmethod
    def count_used(self, element: Batch) -> int:
        """Returns how many examples of an element steps use.

        Args:
            element: a structure of arrays, as a reader returned it
        """

    def find_number_of_steps(self, dataset: tf.data.Dataset) -> int | None:
        """Returns the number of steps in a pass, or None if the pass has to be read to know it."""
        return None

    def find_fixed_size(self, spec: BatchSpec) -> int | None:
        """Returns the number of examples in each global batch, or None if batches differ in it."""
        for tensor_spec in tf.nest.flatten(spec):
            if tensor_spec.shape.rank:
                return cast("int | None", tensor_spec.shape[0])
        return None

    def make_share_spec(self, spec: BatchSpec) -> BatchSpec:
        """Returns the specification of a share of batches that have the specification ``spec``."""
        examples = self.find_fixed_size(spec) or 0
        rows, remainder = divmod(examples, self.shape.shares)
        fixed_rows = None
        if rows > 0 and remainder == 0:
            fixed_rows = rows
        return tf.nest.map_structure(lambda tensor_spec: set_rows(tensor_spec, fixed_rows), spec)

    def draw(self, read: Callable[[], Batch]) -> Batch | None:
        """Draws a global batch; None if shares are drawn one by one, by ``take_shares``."""
        return read()

    def take_shares(
        self,
        batch: Batch | None,
        examples: Count,
        micro_batch: Count,
        replicas: range,
        read: Callable[[], Batch],
    ) -> list[Share]:
        """Returns the shares that the replicas of this process have in a micro-batch.

        Args:
            batch: the result of ``draw``
            examples: the number of examples in the batch
            micro_batch: the index of the micro-batch
            replicas: the numbers of this process's replicas, among those of all processes
            read: draws an element
        """
        shape = self.shape
        first = micro_batch * shape.replicas
        return [
            take_share(batch, examples, first + replica, shape.shares, shape.replicas)
            for replica in replicas
        ]


class JoinedRows(Sharing):
    """Elements of any number of rows are joined, and cut into global batches."""

    def make_batches(self, dataset: tf.data.Dataset, is_endless: bool) -> tf.data.Dataset:
        """Returns the batches of a pass."""
        batches = dataset.rebatch(self.shape.batch, drop_remainder=not self._keeps_last_batch)
        # Joining has compared the tensors with each other, which is all that the default does.
        if self._count_examples.is_default:
            return batches
        return check_counts(batches, self._count_examples)

    def count_used(self, element: Batch) -> int:
        """Returns the number of rows."""
        return _count_array_rows(element)

    def find_number_of_steps(self, dataset: tf.data.Dataset) -> int | None:
        """Returns the number of steps in a pass, if TensorFlow knows the number of examples."""
        examples = int(dataset.unbatch().cardinality())
        if examples < 0:
            return None
        if self._keeps_last_batch:
            examples += self.shape.batch - 1
        return examples // self.shape.batch


class FixedBatches(Sharing):
    """Each element is a global batch; those of another size are left out, or kept if smaller."""

    elements_per_batch = 1

    def make_batches(self, dataset: tf.data.Dataset, is_endless: bool) -> tf.data.Dataset:
        """Returns the batches of a pass."""
        if self._keeps_last_batch:
            return check_counts(dataset, self._count_examples)

        def is_full(*element: Batch) -> tf.Tensor:
            batch = _unpack(dataset, element)
            with check_count(self._count_examples, batch):
                return tf.equal(count_rows(batch), self.shape.batch)

        # Joining whole batches changes nothing but the specification, which has their size then.
        return dataset.filter(is_full).rebatch(self.shape.batch, drop_remainder=True)

    def count_used(self, element: Batch) -> int:
        """Returns the number of rows; 0 for an element that is left out."""
        rows = _count_array_rows(element)
        if self._keeps_last_batch or rows == self.shape.batch:
            return rows
        return 0


class ReadyShares(Sharing):
    """Each element is the share of one replica, of as many examples as all shares have.

    Elements of another number of examples are left out. So are the elements at the end of a pass
    that are too few for a global batch.
    """

    by_rows = False

    def __init__(self, shape: BatchShape, keeps_last_batch: bool, count_examples: Hook) -> None:
        super().__init__(shape, keeps_last_batch, count_examples)
        self.per_replica_batch_size = shape.per_replica
        self.elements_per_batch = shape.shares

    def make_batches(self, dataset: tf.data.Dataset, is_endless: bool) -> tf.data.Dataset:
        """Returns the shares of a pass."""
        shares = self.shape.shares

        def is_full(*element: Batch) -> tf.Tensor:
            count = self._count_examples.trace(batch=_unpack(dataset, element))
            return tf.equal(tf.cast(count, tf.int64), self.shape.per_replica)

        def join_windows(*windows: tf.data.Dataset) -> tf.data.Dataset:
            return tf.data.Dataset.zip(_unpack(dataset, windows))

        full = dataset.filter(is_full)
        if shares == 1 or is_endless:
            return full
        return full.window(shares, drop_remainder=True).flat_map(join_windows)

    def count_used(self, element: Batch) -> int:
        """Returns the number of examples; 0 for an element that is left out."""
        with tf.device("CPU:0"):
            batch = tf.nest.map_structure(tf.constant, element)
            examples = int(self._count_examples.trace(batch=batch))
        if examples == self.shape.per_replica:
            return examples
        return 0

    def find_fixed_size(self, spec: BatchSpec) -> int | None:
        """Returns the number of examples in a global batch, which is always the same."""
        return self.shape.batch

    def make_share_spec(self, spec: BatchSpec) -> BatchSpec:
        """Returns the specification of an element."""
        return spec

    def draw(self, read: Callable[[], Batch]) -> Batch | None:
        """Draws nothing, because shares are drawn as they are dealt out; except logical replicas'.

        A device computes its logical replicas one after another, so all shares are drawn before
        that, in their order. They are packed into one tensor, see ``pack_elements``.
        """
        if self.shape.logical_replicas is None:
            return None
        with tf.device("CPU:0"):
            return pack_elements([read() for _ in range(self.shape.logical_replicas)])

    def take_shares(
        self,
        batch: Batch | None,
        examples: Count,
        micro_batch: Count,
        replicas: range,
        read: Callable[[], Batch],
    ) -> list[Share]:
        """Draws the shares of a micro-batch; those of other processes are read and dropped."""
        shares = [Share(read()) for _ in range(self.shape.replicas)]
        return [shares[replica] for replica in replicas]


def choose_sharing(
    data_hooks: DataHooks, hooks: Hooks, shape: BatchShape, keeps_last_batch: bool
) -> tuple[Sharing, HookedData]:
    """Chooses how elements become shares, by the result of ``count_examples`` for the first one.

    If that is the first dimension of all tensors of the element, an example is a row. Otherwise
    each element is a share. Nothing is read if the shapes of all elements tell.

    Returns:
        The way, and the data that the hooks returned for it, of which nothing has been read.

    Raises:
        SetupError: the elements are not batched as they should be.
    """
    hook = hooks.count_examples
    data = data_hooks.call(shape.batch)
    spec = data.dataset.element_spec
    by_rows = counts_rows_of_spec(hook, data.hook, spec)
    element: Batch | None = None
    if by_rows is None or has_varying_widths(spec):
        element = data_hooks.read_first(data, shape.batch)
        by_rows = element is None or counts_rows(hook, data.hook, spec, element, shape.batch)
    if by_rows:
        is_batch = element is not None and int(count_rows(element)) == shape.batch
        if has_varying_widths(spec) and is_batch:
            return FixedBatches(shape, keeps_last_batch, hook), data
        return JoinedRows(shape, keeps_last_batch, hook), data
    if shape.shares > 1:
        data = data_hooks.call(shape.per_replica, data.reader)
        element = data_hooks.read_first(data, shape.per_replica)
    examples = 0
    if element is not None:
        examples = read_count(hook, element) or 0
    if examples * shape.shares != shape.batch:
        raise data.hook.reject(
            f"returned elements of {examples} examples, expected {shape.batch} / {shape.shares}: "
            "since count_examples does not count rows, each element is the share of one replica; "
            "batch by per_replica_batch_size."
        )
    return ReadyShares(shape, keeps_last_batch, hook), data


def counts_rows_of_spec(count_examples: Hook, data_hook: Hook, spec: BatchSpec) -> bool | None:
    """Returns True if ``count_examples`` counts rows whatever the elements are; None if unknown.

    Raises:
        SetupError: there is no hook ``count_examples``, and elements have no rows.
    """
    if not count_examples.is_default:
        if has_fixed_count(count_examples, spec):
            return True
        return None
    if not may_have_rows(spec):
        raise reject_elements(data_hook, spec)
    return True


def may_have_rows(spec: BatchSpec) -> bool:
    """Returns False if the shapes show that the tensors of elements share no first dimension."""
    sizes = _list_sizes(spec)
    return bool(sizes) and len(sizes - {None}) <= 1 and not has_scalars(spec)


def has_scalars(spec: BatchSpec) -> bool:
    """Returns True if elements have a scalar, such as the label of a single example."""
    shapes = [tensor_spec.shape for tensor_spec in tf.nest.flatten(spec)]
    return any(shape.rank == 0 for shape in shapes)


def has_fixed_count(count_examples: Hook, spec: BatchSpec) -> bool:
    """Returns whether the shapes show that the hook counts the rows of each element."""
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
    """Returns the first dimensions of the tensors of elements; empty if some are no tensors."""
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
        count_examples: the hook
        data_hook: the hook that returned the element
        spec: the specification of elements
        element: the first element
        examples: the number of examples that it should have

    Raises:
        SetupError: ``count_examples`` returns no number of examples for it.
    """
    count = read_count(count_examples, element)
    if count is None or (count < 0 and not may_have_rows(spec)):
        raise reject_elements(data_hook, spec)
    if count < 0:
        raise data_hook.reject(f"{explain_different_rows(element, examples)}.")
    return count == read_rows(element)


def read_count(count_examples: Hook, element: Batch) -> int | None:
    """Returns the hook's count for an element: -1 if its tensors differ, None for scalars."""
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
    """Returns the number of rows of an element; None if its tensors differ in it."""
    try:
        rows = leading_dimension(element)
    except DifferentRowsError:
        return None
    if rows is None or int(rows) < 0:
        return None
    return int(rows)


def reject_elements(data_hook: Hook, spec: BatchSpec) -> SetupError:
    """Returns the error for elements that are no batches."""
    return data_hook.reject(
        f"returned elements {describe(spec)}, expected batches of tensors that have a row for each "
        "example: use dataset.batch(global_batch_size), or write count_examples."
    )


def check_counts(dataset: tf.data.Dataset, count_examples: Hook) -> tf.data.Dataset:
    """Returns the dataset, whose reading fails at an element of which no rows are counted."""
    if has_fixed_count(count_examples, dataset.element_spec):
        return dataset

    def check(*element: Batch) -> Batch:
        batch = _unpack(dataset, element)
        with check_count(count_examples, batch):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    return dataset.map(check)


def check_count(count_examples: Hook, batch: Batch) -> contextlib.AbstractContextManager[object]:
    """Returns a context in whose ops an element is refused of which no rows are counted."""
    rows = tf.cast(leading_dimension(batch), tf.int64)
    count = tf.cast(count_examples.trace(batch=batch), tf.int64)
    agree = tf.logical_and(tf.equal(count, rows), rows >= 0)
    return tf.control_dependencies([tf.debugging.Assert(agree, [_CONTRADICTED])])


def is_contradiction(error: BaseException) -> bool:
    """Returns whether an op failed because an element contradicts the first one."""
    return any(text in str(error) for text in (_REBATCH_FAILED, _CONTRADICTED))


def explain_contradiction(count_examples: Hook, elements: Iterable[Batch], examples: int) -> str:
    """Explains why elements were taken for rows, and the first of them that has no rows.

    Args:
        count_examples: the hook
        elements: elements of the dataset from its start on
        examples: the number of examples that they should have
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


def _unpack(dataset: tf.data.Dataset, arguments: tuple[Structure, ...]) -> Structure:
    """Returns the element that a function of ``Dataset.map`` was called with."""
    if not isinstance(dataset.element_spec, tuple):
        return arguments[0]
    return tf.nest.pack_sequence_as(dataset.element_spec, tf.nest.flatten(arguments))
