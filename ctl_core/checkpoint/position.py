"""Saves and restores the position in the training data.

If the position cannot be saved exactly, a resumed run reads and drops examples until it has reached
the position.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from ctl_core.checkpoint.record import Record
from ctl_core.compat import (
    count_saved_draws,
    draws_random_numbers,
    find_graphs,
    find_inputs,
    list_stages,
    read_cache_file,
    read_position,
    restore_position,
    stops_on_empty_dataset,
)
from ctl_core.input.caches import has_snapshot, list_cache_files, list_unfinished_caches
from ctl_core.model.state import State
from ctl_core.numerics.randomness import find_random_ops
from ctl_core.numerics.variables import count_elements
from ctl_core.run.console import Console
from ctl_core.run.errors import format_error

# The exceptions that TensorFlow raises if a file that it reads is truncated, changed or missing.
UNREADABLE = (tf.errors.OpError, RuntimeError, IndexError)
# Ops that keep state outside of the pipeline, or draw random numbers from such state.
_STATEFUL_OPS = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless", "RngReadAndSkip"})

# The minimum size of a saved position that is reported to the user (bytes).
LARGE_POSITION = 10_000_000


class SavedPosition(NamedTuple):
    """A position in the training data. Both attributes are empty if no position can be saved.

    Attributes:
        reader: the position of a reader in Python, as a string; empty for a tf.data pipeline
        tensors: the batches that were read ahead, and the position of a tf.data pipeline; empty for
            a reader
    """

    reader: str = ""
    tensors: Sequence[tf.Tensor] = ()


class InputPosition:
    """The position of this process in the training data.

    The position of a reader in Python is saved as a string in the record. The position of a tf.data
    pipeline is saved in a file next to the record.
    """

    def __init__(self, state: State, console: Console) -> None:
        self._state = state
        self._console = console
        self._is_weighed = False
        reader = state.data.reader
        self._caches = reader is None and (
            has_snapshot(state.data.dataset) or bool(list_cache_files(state.data.dataset))
        )
        if reader is not None:
            self._obstacle = reader.obstacle
        else:
            self._obstacle = find_outside_state(state.data.dataset)

    def describe(self) -> dict[str, Any]:
        """Returns a description of the training data; it does not depend on the devices.

        A saved position can be restored only if the description has not changed, except for the
        folder.
        """
        config = self._state.config
        data = self._state.data
        batches_read_at_once = 0
        if data.reader is None:
            batches_read_at_once = data.unit
        shares_of_whole_elements = 0
        if not data.shape.by_rows:
            shares_of_whole_elements = data.shape.leaves
        return {
            "batch_size": config.batch_size,
            "last_batch": config.last_batch,
            "overfit_batches": config.overfit_batches,
            "batches_read_at_once": batches_read_at_once,
            "whole": shares_of_whole_elements,
            "folder": os.getcwd(),
            "own_rows": data.mark is not None,
        }

    def has_same_batches(self, record: Record) -> bool:
        """Returns True if the data of a record were divided into batches in the same way as now."""
        present = self.describe()
        names = ("batch_size", "last_batch", "overfit_batches", "whole")
        return all(record.input.get(name) == present[name] for name in names)

    def read(self) -> SavedPosition:
        """Reads the current position, which is empty if no position can be saved.

        Prints a warning in this case, unless the pipeline fills a cache, contains a snapshot, or
        uses ``ctl.data.own_rows``.
        """
        if self._state.data.reader is None and self._is_filling_cache():
            # A resumed run reads and drops at most one pass of the data, and fills the cache again.
            return SavedPosition()
        if self._state.data.reads_mark_again:
            return SavedPosition()
        obstacle = self._obstacle
        if obstacle is None:
            try:
                return self._read_exactly()
            except (ValueError, tf.errors.FailedPreconditionError) as error:
                obstacle = format_error(error, 120)
        if self._state.data.mark is not None:  # a resumed run reads only the part before the mark
            return SavedPosition()
        self._console.warn(
            f"the position in the training data cannot be saved exactly ({obstacle}); a "
            "resumed run will read the data again from the start and drop what was used. For "
            "random changes to examples, see ctl.data.with_seeds."
        )
        return SavedPosition()

    def _read_exactly(self) -> SavedPosition:
        """Reads the current position, which can be restored exactly.

        Raises:
            ValueError: the state of the reader contains a value that cannot be saved.
            FailedPreconditionError: a stage of the pipeline cannot be saved.
        """
        data = self._state.data
        if data.reader is not None:
            return SavedPosition(reader=data.reader.write_position())
        held = [variable.read_value() for variable in data.held]
        return SavedPosition(tensors=[*held, read_position(data.stream)])

    def _is_filling_cache(self) -> bool:
        """Returns whether the position depends on an unfinished cache file or on a snapshot.

        An unfinished cache file is lost if the process is killed, and a position in it could not be
        restored.
        """
        dataset = self._state.data.dataset
        return self._caches and (has_snapshot(dataset) or bool(list_unfinished_caches(dataset)))

    def write(self, position: SavedPosition, record: Record, prefix: Path) -> None:
        """Writes a position to the record or to a file.

        Args:
            position: the result of ``read``
            record: the record of the checkpoint, in which ``reader`` and ``input_saved`` are set
            prefix: the prefix of the file
        """
        tensors = position.tensors
        if position.reader:
            record.reader = position.reader
            record.input_saved = True
        elif tensors:
            tf.raw_ops.SaveV2(tensors=tensors, **_name_tensors(prefix, len(tensors)))
            record.input_saved = has_draws(prefix, self._state.data.dataset)
            self._weigh(prefix)

    def _weigh(self, prefix: Path) -> None:
        """Reports once if the position takes more space in a checkpoint than the variables."""
        if self._is_weighed:
            return
        self._is_weighed = True
        position = sum(file.stat().st_size for file in prefix.parent.glob(f"{prefix.name}.*"))
        variables = self._state.recording.variables.values()
        sizes = [variable.dtype.size * count_elements(variable) for variable in variables]
        if position > max(LARGE_POSITION, sum(sizes)):
            self._console.say(
                f"each checkpoint contains {position / 1e6:.0f} MB for the position in "
                "the data, such as shuffle buffers, in addition to "
                f"{sum(sizes) / 1e6:.1f} MB of variables; ctl.data.index_shuffle needs "
                "no buffer, and --keep 3 keeps fewer checkpoints."
            )

    def restore(self, record: Record, prefix: Path) -> None:
        """Restores the position in a record, by reading and dropping examples if necessary."""
        data = self._state.data
        obstacle = self._find_obstacle(record)
        if obstacle is None:
            try:
                if data.reader is None:
                    self._restore_stream(prefix)
                else:
                    obstacle = data.reader.go_to(record.reader)
            except UNREADABLE:
                obstacle = "the saved position no longer fits the data, or its file is damaged"
        if self._state.cluster.agree(obstacle is None):
            return
        examples = record.progress["examples"]
        if data.mark is not None and not self._state.config.overfit_batches:
            self._console.say(
                f"the position in the training data is restored by skipping {examples} examples "
                "before ctl.data.own_rows; none of them is prepared again."
            )
        else:
            reason = obstacle or "another process cannot read the position that it saved"
            self._console.warn(
                f"the position in the training data is restored by reading and dropping {examples} "
                f"examples, because {reason}."
            )
        data.begin_anew(skip=examples)

    def _restore_stream(self, prefix: Path) -> None:
        """Restores the position of a tf.data pipeline from a file."""
        data = self._state.data
        dtypes = [*(variable.dtype for variable in data.held), tf.variant]
        *held, position = tf.raw_ops.RestoreV2(dtypes=dtypes, **_name_tensors(prefix, len(dtypes)))
        for variable, value in zip(data.held, held, strict=True):
            variable.assign(value)
        restore_position(data.stream, position)

    def _find_obstacle(self, record: Record) -> str | None:
        """Returns why the position in a record cannot be restored; None if it can be."""
        if self._state.data.reads_mark_again:
            return "each process of a cluster would need its own"
        if not record.input_saved:
            return "no complete position could be saved"
        present = self.describe()
        if present["own_rows"] != record.input.get("own_rows", False):
            return "it was saved before ctl.data.own_rows was added"
        for name, value in record.input.items():
            if name != "folder" and present.get(name) != value:
                return f"it was saved with {name} {value}"
        saved_folder = record.input["folder"]
        if saved_folder != present["folder"] and self._reads_texts():
            return f"it may contain paths of files in {saved_folder}, where the run was before"
        return None

    def _reads_texts(self) -> bool:
        """Returns whether a stage of the pipeline produces strings, which may be file names.

        The saved position itself cannot be searched for file names, because it may be compressed.
        """
        if self._state.data.reader is not None:
            return False
        specs = [stage.element_spec for stage in list_stages(self._state.data.dataset)]
        return any(getattr(spec, "dtype", None) == tf.string for spec in tf.nest.flatten(specs))


def _name_tensors(prefix: Path, count: int) -> dict[str, Any]:
    """Returns the arguments of SaveV2 and RestoreV2 that name numbered tensors in a file."""
    return {
        "prefix": str(prefix),
        "tensor_names": [str(index) for index in range(count)],
        "shape_and_slices": [""] * count,
    }


def find_outside_state(dataset: tf.data.Dataset) -> str | None:
    """Returns why the position in a pipeline cannot be saved and restored; None if it can be.

    A stage may keep state outside of the pipeline. TensorFlow refuses to save such a stage, but
    only once the stage is running. Another obstacle is a mixture (``sample_from_datasets``) of
    datasets that end: TensorFlow hangs when it restores the mixture after one of them has ended.
    """
    for stage in list_stages(dataset):
        if not stops_on_empty_dataset(stage):
            _, *mixed_datasets = find_inputs(stage)  # the first input chooses among the others
            cardinalities = [dataset.cardinality() for dataset in mixed_datasets]
            if any(number != tf.data.INFINITE_CARDINALITY for number in cardinalities):
                return (
                    "it mixes datasets that end; repeat each of them, or pass "
                    "stop_on_empty_dataset=True"
                )
        for graph in find_graphs(stage):
            stateful_ops = find_random_ops(graph, _STATEFUL_OPS)
            if stateful_ops:
                return f"it uses {', '.join(stateful_ops)}, which has its own state"
    return None


def has_draws(prefix: Path, dataset: tf.data.Dataset) -> bool:
    """Returns whether a saved position contains the state of each stage that draws random numbers.

    TensorFlow leaves out a stage that has been read to its end while a later stage, such as rebatch
    or prefetch, still contains elements. After such a position is restored, the next pass would
    repeat the order of the first pass. TensorFlow also leaves out a cache in memory in this
    situation, and the restored pipeline would fill the cache again.
    """
    expected = _count_drawing_stages(dataset)
    if expected == 0:
        return True
    content = Path(f"{prefix}.data-00000-of-00001").read_bytes()
    return count_saved_draws(content) >= expected


def _count_drawing_stages(dataset: tf.data.Dataset) -> int:
    """Returns the number of stages that draw random numbers.

    All stages before a cache in memory count as one, because only the cache has a saved state. The
    stages before a cache file do not count, because a complete file replaces them.
    """
    draws = sum(map(_count_drawing_stages, find_inputs(dataset)))
    cache_file = read_cache_file(dataset)
    if cache_file is not None:
        if cache_file == "":  # a cache in memory
            return min(draws, 1)
        return 0
    if draws_random_numbers(dataset):
        return draws + 1
    return draws
