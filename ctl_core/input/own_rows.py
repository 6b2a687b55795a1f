"""Lets each process prepare only its own rows, after ``ctl.data.own_rows`` in a pipeline.

All processes read the part of the pipeline before this mark alike. ``RowSelection`` groups the
examples of this part into global batches, and keeps the rows of the leaves of a process. The rest
of the pipeline prepares them one by one, and ``join_rows`` joins the prepared rows again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ctl_core.compat import (
    drops_remainder,
    find_graphs,
    find_inputs,
    groups_by_window,
    has_free_order,
    is_batch,
    is_map,
    is_padded_batch,
    keeps_rows,
    list_stages,
    name_stage,
)
from ctl_core.data import ROW_SELECTION, ShuffleFrom
from ctl_core.hooks.hooks import Hook
from ctl_core.input.batches import (
    count_pass_batches,
    count_rows,
    find_rows,
    has_varying_widths,
    take_batch_rows,
    unpack_arguments,
)
from ctl_core.numerics.randomness import find_random_ops, list_nodes
from ctl_core.types import Batch, Count

# Ops that change a state outside of the pipeline. A generator of TensorFlow reads and skips its
# random numbers; a random layer of Keras assigns the state of its generator.
_STATEFUL_OPS = frozenset({"RngReadAndSkip", "AssignVariableOp", "AssignAddVariableOp"})
# Ops that call a Python function, and ops that decode a picture or a sound.
_PYTHON_OPS = frozenset({"PyFunc", "EagerPyFunc"})
_DECODER = re.compile("Decode(AndCrop)?(Image|Jpeg|Png|Bmp|Gif|WebP|Wav)")
_MARK = "ctl.data.own_rows"


class PreparedRows(NamedTuple):
    """The rows that this process has prepared of a global batch.

    Attributes:
        rows: the rows
        examples: the number of examples in the global batch, an int32 scalar
    """

    rows: Batch
    examples: tf.Tensor


class Mark(NamedTuple):
    """A call of ``own_rows``.

    Attributes:
        source: the dataset that was passed
        dataset: the dataset that was returned
        is_vector: whether an element of ``source`` is a vector of examples
    """

    source: tf.data.Dataset
    dataset: tf.data.Dataset
    is_vector: bool

    @property
    def is_endless(self) -> bool:
        """Whether the examples are endless, so that there are no passes."""
        return bool(self.source.cardinality() == tf.data.INFINITE_CARDINALITY)

    def find_number_of_examples(self) -> int | None:
        """Returns the number of examples in a pass, or None if they must be read to count them."""
        examples = int(self.source.cardinality())
        if examples < 0:
            return None
        return examples

    def count_examples(self) -> int:
        """Reads a pass, and returns the number of examples in it."""
        return int(self.source.reduce(np.int64(0), lambda count, *_: count + 1))


@dataclasses.dataclass(frozen=True)
class RowSelection:
    """Selects the rows of a process in each global batch.

    Attributes:
        batch: the number of examples in a global batch
        leaves: the number of leaves of a global batch, on all processes
        process_leaves: the indices of the leaves that the process computes
        keeps_last_batch: whether a pass may end with a smaller batch
        is_repeated: whether one pass follows another, as in training
        start: the number of global batches to skip
    """

    batch: int
    leaves: int
    process_leaves: range
    keeps_last_batch: bool
    is_repeated: bool = True
    start: int = 0

    @property
    def has_all_rows(self) -> bool:
        """True if this is the only process."""
        return len(self.process_leaves) == self.leaves

    def select_all(self) -> RowSelection:
        """Returns the selection of a single process that reads from the start."""
        return dataclasses.replace(self, process_leaves=range(self.leaves), start=0)

    def find_rows(self, examples: Count) -> tuple[Count, Count]:
        """Returns the index of the first row of the process, and the number of its rows.

        A process without rows prepares the last row of the batch, as a placeholder.

        Args:
            examples: the number of examples in the global batch
        """
        first, rows = find_rows(self.process_leaves, examples, self.leaves)
        if isinstance(examples, int) and rows == 0:
            return examples - 1, 1
        return first, rows

    @contextmanager
    def note_marks(self) -> Iterator[list[Mark]]:
        """Selects rows in each call of ``own_rows`` inside the context, and yields their marks."""
        marks: list[Mark] = []

        def select_rows(
            source: tf.data.Dataset, shuffle_from: ShuffleFrom | None
        ) -> tf.data.Dataset:
            batches = self._make_batches(source, shuffle_from)
            if not self.has_all_rows:
                batches = self._take_rows(batches)
            dataset = batches.unbatch()
            marks.append(Mark(source, dataset, is_vector=shuffle_from is not None))
            return dataset

        token = ROW_SELECTION.set(select_rows)
        try:
            yield marks
        finally:
            ROW_SELECTION.reset(token)

    def _make_batches(
        self, source: tf.data.Dataset, shuffle_from: ShuffleFrom | None
    ) -> tf.data.Dataset:
        """Returns the global batches that follow the first ``start`` ones."""
        if shuffle_from is not None:  # it starts anywhere without computing what comes before
            return shuffle_from(self.start * self.batch).rebatch(self.batch, drop_remainder=True)
        batches = source.batch(self.batch, drop_remainder=not self.keeps_last_batch)
        if self.is_repeated and source.cardinality() != tf.data.INFINITE_CARDINALITY:
            batches = batches.repeat()
        if self.start > 0:
            batches = batches.skip(self.start)
        return batches

    def _take_rows(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the rows of the process in each global batch."""

        def take(*arguments: Batch) -> Batch:
            batch = unpack_arguments(batches, arguments)
            return take_batch_rows(batch, *self.find_rows(count_rows(batch)))

        return batches.map(take)

    def join_rows(self, dataset: tf.data.Dataset, examples: int | None) -> tf.data.Dataset:
        """Joins the prepared rows of each global batch.

        Args:
            dataset: batches of prepared rows, of any sizes
            examples: the number of examples in a pass; None if they are endless, or if smaller
                batches are not kept

        Returns:
            A dataset of the process's rows in each global batch. If there are several processes,
            its elements are ``PreparedRows``, except in training if all batches have the same size.
        """
        if self.is_repeated and not self.has_batches_of_several_sizes(examples):
            _, rows = self.find_rows(self.batch)
            return dataset.rebatch(rows, drop_remainder=True)
        assert examples is not None
        sizes = np.full(max(1, -(-examples // self.batch)), self.batch, np.int32)
        sizes[-1] = examples - self.batch * (len(sizes) - 1)
        sizes = np.roll(sizes, -self.start)
        rows_by_size = {size: int(self.find_rows(tf.constant(size))[1]) for size in {*sizes}}
        joined = dataset.rebatch(np.array([rows_by_size[size] for size in sizes], np.int64))
        if self.has_all_rows:
            return joined
        all_sizes = tf.data.Dataset.from_tensor_slices(sizes)
        if self.is_repeated:
            all_sizes = all_sizes.repeat()
        return tf.data.Dataset.zip((joined, all_sizes)).map(PreparedRows)

    def has_batches_of_several_sizes(self, examples: int | None) -> bool:
        """Returns whether the last batch of a pass is smaller than the others.

        Args:
            examples: see ``join_rows``
        """
        return self.keeps_last_batch and examples is not None and examples % self.batch != 0

    def count_steps(self, examples: int) -> int:
        """Returns the number of global batches in a pass of a number of examples."""
        return count_pass_batches(examples, self.batch, self.keeps_last_batch)

    def count_batches(self, used: int, examples: int | None) -> int:
        """Returns the number of global batches that contain the first ``used`` examples of a run.

        Args:
            used: a number of examples, not counting those that were dropped
            examples: see ``join_rows``
        """
        if not self.has_batches_of_several_sizes(examples):
            return -(-used // self.batch)
        assert examples is not None
        passes, rest = divmod(used, examples)
        return passes * self.count_steps(examples) - (-rest // self.batch)


@contextmanager
def repeat_marked_examples() -> Iterator[list[tf.data.Dataset]]:
    """Repeats the examples before each mark that is set inside the context, without end.

    Yields the results of ``own_rows``.
    """
    select_rows = ROW_SELECTION.get()
    assert select_rows is not None
    results: list[tf.data.Dataset] = []

    def select_repeated(
        source: tf.data.Dataset, shuffle_from: ShuffleFrom | None
    ) -> tf.data.Dataset:
        if source.cardinality() != tf.data.INFINITE_CARDINALITY:
            source = source.repeat()
        results.append(select_rows(source, shuffle_from))
        return results[-1]

    token = ROW_SELECTION.set(select_repeated)
    try:
        yield results
    finally:
        ROW_SELECTION.reset(token)


def find_mark(hook: Hook, dataset: tf.data.Dataset, marks: list[Mark]) -> Mark | None:
    """Returns the mark that a dataset is read from, or None if there is none.

    Args:
        hook: the hook that returned the dataset
        dataset: the dataset
        marks: the marks that the hook has set

    Raises:
        SetupError: a stage after the mark may drop, add or reorder examples, or draws random
            numbers from its own state; or the mark does not go with another part of the hook.
    """
    by_dataset = {id(mark.dataset): mark for mark in marks}
    if not any(id(stage) in by_dataset for stage in list_stages(dataset)):
        return None
    if "input_context" in hook.arguments:
        raise hook.reject(
            f"takes input_context and calls {_MARK}, which both select the rows of a process; "
            "leave out one."
        )
    stage = dataset
    batches = 0
    while id(stage) not in by_dataset:
        _refuse_stage(hook, stage)
        batches += is_batch(stage)
        (stage,) = find_inputs(stage)
    if batches != 1:
        raise hook.reject(
            f"calls batch {batches} times after {_MARK}, expected once, such as "
            "own_rows(files).map(load).batch(global_batch_size)."
        )
    mark = by_dataset[id(stage)]
    for earlier in list_stages(mark.source):
        if id(earlier) in by_dataset:
            raise hook.reject(f"calls {_MARK} twice in a pipeline; leave out one call.")
        if groups_by_window(earlier):
            raise hook.reject(
                f"groups examples by length before {_MARK}, which forms other batches; leave out "
                f"bucket_by_length or {_MARK}."
            )
    if has_free_order(dataset):
        raise hook.reject(
            f"has deterministic=False, but with {_MARK}, all processes must read examples in the "
            "same order; leave out deterministic=False."
        )
    return mark


def _refuse_stage(hook: Hook, stage: tf.data.Dataset) -> None:
    """Raises an error if a stage cannot be after the mark."""
    name = name_stage(stage)
    if not keeps_rows(stage):
        cure = f"put it before {_MARK}"
        if name in ("repeat", "take", "skip"):
            cure = f"leave it out, or put it before {_MARK}"
        raise hook.reject(
            f"calls {name} after {_MARK}, where elements may only be changed one by one; {cure}."
        )
    if drops_remainder(stage):
        raise hook.reject(
            f"calls {name} with drop_remainder=True after {_MARK}, which would drop examples; "
            "leave out drop_remainder and see the setting last_batch."
        )
    if is_padded_batch(stage) and has_varying_widths(stage.element_spec):
        raise hook.reject(
            f"calls padded_batch without fixed shapes after {_MARK}, so the padding would depend "
            "on the process; pass padded_shapes without None."
        )
    for graph in find_graphs(stage):
        ops = find_random_ops(graph, _STATEFUL_OPS)
        if ops:
            raise hook.reject(
                f"a function after {_MARK} draws random numbers from its own state "
                f"({', '.join(ops)}); call ctl.data.with_seeds before {_MARK}, and use the seeds "
                "with tf.random.stateless_*."
            )


def find_expensive_op(dataset: tf.data.Dataset) -> str | None:
    """Returns the type of an op in a ``map`` that takes long for each example; None if none does.

    These are calls of Python functions, and decoders of pictures and sounds.
    """
    for stage in list_stages(dataset):
        if not is_map(stage):
            continue
        for graph in find_graphs(stage):
            for node in list_nodes(graph):
                if node.op in _PYTHON_OPS or _DECODER.fullmatch(node.op):
                    return str(node.op)
    return None
