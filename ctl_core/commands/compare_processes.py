"""Compares the data of one process with those of two, for ``train --check``.

After ``ctl.data.own_rows``, each process prepares only its own rows. A function that treats rows
together, such as a mixture of the rows of a batch, then gives other results than in one process.
This module builds the pipeline for one process and for each of two, all in this process, and
compares some batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from ctl_core.commands.check_console import CheckConsole
from ctl_core.evaluation.sets import call_eval_hook
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.input.batches import find_rows
from ctl_core.input.data_hooks import DataHooks
from ctl_core.input.own_rows import Mark, PreparedRows, RowSelection, find_mark
from ctl_core.model.state import State
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.numerics.summation_tree import split_leaves
from ctl_core.run.errors import SetupError
from ctl_core.run.settings import Config
from ctl_core.types import Batch

PROCESSES = 2
# The number of batches at the start of the data that are compared.
_BATCHES = 2
# The relative and the absolute difference that may be due to rounding.
_TOLERANCE = 1e-5

# Returns the dataset that a hook returns for a selection of rows, and its mark.
MakeDataset = Callable[[RowSelection], tuple[tf.data.Dataset, Mark | None]]


def compare_processes(hooks: Hooks, config: Config, console: CheckConsole, state: State) -> None:
    """Compares batches of one process with the joined rows of two, if ``own_rows`` is called.

    The first batches are compared, and the last one of a pass if it is smaller.

    Args:
        hooks: the hooks of the run
        config: the settings of the run
        console: prints a summary of the comparison
        state: the state of the rehearsed run

    Raises:
        SetupError: the data differ; the message names the hook and the batch.
    """
    leaves = max(config.logical_replicas or 0, PROCESSES * config.accumulate_steps)
    selection = RowSelection(
        batch=config.batch_size,
        leaves=leaves,
        process_leaves=range(leaves),
        keeps_last_batch=config.keeps_last_batch,
    )
    compared = []
    with keep_seeds():
        if state.data.mark is not None:
            data_hooks = DataHooks(hooks, config.seed, replicas=1, selection=selection)
            compare_dataset(hooks.create_dataset, _make_training_data(data_hooks), selection)
            compared.append("training")
        if hooks.create_eval_dataset is not None and state.evaluation is not None:
            size = config.eval_batch_size or config.batch_size
            selection = dataclasses.replace(
                selection, batch=size, keeps_last_batch=True, is_repeated=False
            )
            for name in state.evaluation.sets:
                make = _make_evaluation_data(hooks.create_eval_dataset, name, config.seed)
                if compare_dataset(hooks.create_eval_dataset, make, selection):
                    compared.append(name or "evaluation")
    if compared:
        console.print(
            f"  the data of one and of {PROCESSES} processes were compared: {', '.join(compared)}"
        )


def _make_training_data(data_hooks: DataHooks) -> MakeDataset:
    def make(selection: RowSelection) -> tuple[tf.data.Dataset, Mark | None]:
        data = data_hooks.call(selection.batch, selection=selection)
        return data.dataset, data.mark

    return make


def _make_evaluation_data(hook: Hook, name: str, seed: int) -> MakeDataset:
    def make(selection: RowSelection) -> tuple[tf.data.Dataset, Mark | None]:
        results = call_eval_hook(hook, selection.batch, seed, selection)
        dataset = results.sets[name]
        if not results.marks:
            return dataset, None
        return dataset, find_mark(hook, dataset, results.marks)

    return make


def compare_dataset(hook: Hook, make: MakeDataset, selection: RowSelection) -> bool:
    """Compares a dataset of one process with the joined rows of two.

    Args:
        hook: the hook that returns the dataset
        make: makes the dataset for a selection of rows
        selection: selects all rows

    Returns:
        True if the dataset was compared; False if it is not read from ``own_rows``.

    Raises:
        SetupError: a batch differs.
    """
    _, mark = make(selection)
    if mark is None:
        return False
    examples = mark.find_number_of_examples()
    if examples is None and not mark.is_endless:
        examples = mark.count_examples()
    starts = [0]
    if selection.is_repeated and selection.has_batches_of_several_sizes(examples):
        assert examples is not None
        starts.append(selection.count_steps(examples) - 1)
    for start in starts:
        whole = dataclasses.replace(selection, start=start)
        processes = [
            dataclasses.replace(whole, process_leaves=process_leaves)
            for process_leaves in split_leaves(selection.leaves, PROCESSES)
        ]
        rows_of_processes = [list(_read_rows(make, each, examples)) for each in processes]
        for index, batch in enumerate(_read_rows(make, whole, examples)):
            rows = [rows_of_process[index] for rows_of_process in rows_of_processes]
            if not _is_joined(batch, rows):
                raise _reject(hook, start + index)
    return True


def _reject(hook: Hook, batch: int) -> SetupError:
    return hook.reject(
        f"batch {batch} (counted from 0) differs if two processes prepare its rows; after "
        "ctl.data.own_rows, a function may only use its example, not other rows, a counter or "
        "random numbers."
    )


def _read_rows(
    make: MakeDataset, selection: RowSelection, examples: int | None
) -> Iterator[list[np.ndarray]]:
    """Yields the rows that a process prepares in each batch, without placeholders.

    Args:
        make: makes the dataset
        selection: selects the rows of the process
        examples: the number of examples in a pass; None if they are endless
    """
    dataset, _ = make(selection)
    if selection.has_all_rows and not selection.is_repeated:
        dataset = dataset.rebatch(selection.batch)
    else:
        dataset = selection.join_rows(dataset, examples)
    for element in dataset.take(_BATCHES):
        rows, size = element, selection.batch
        if isinstance(element, PreparedRows):
            rows, size = element.rows, int(element.examples)
        number = None
        if not selection.has_all_rows:  # without the placeholder of a process that has no rows
            _, number = find_rows(selection.process_leaves, size, selection.leaves)
        yield [array[:number] for array in _list_arrays(rows)]


def _list_arrays(batch: Batch) -> list[np.ndarray]:
    """Returns the tensors of a batch as arrays; a row of a ragged tensor becomes a string."""
    arrays = []
    for tensor in tf.nest.flatten(batch):
        if isinstance(tensor, tf.RaggedTensor):
            arrays.append(np.array([str(row) for row in tensor.to_list()]))
        elif isinstance(tensor, tf.SparseTensor):
            arrays.append(tf.sparse.to_dense(tensor).numpy())
        else:
            arrays.append(tensor.numpy())
    return arrays


def _is_joined(batch: list[np.ndarray], rows: list[list[np.ndarray]]) -> bool:
    """Returns whether the rows of all processes are those of a batch, up to rounding."""
    for whole, *parts in zip(batch, *rows, strict=True):
        if any(part.shape[1:] != whole.shape[1:] for part in parts):
            return False
        joined = np.concatenate(parts)
        if joined.shape != whole.shape:
            return False
        if not np.issubdtype(whole.dtype, np.inexact):
            is_equal = np.array_equal(joined, whole)
        else:
            is_equal = np.allclose(joined, whole, _TOLERANCE, _TOLERANCE, equal_nan=True)
        if not is_equal:
            return False
    return True
