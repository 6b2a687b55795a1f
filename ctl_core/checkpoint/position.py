"""The position in the training data: saved if it is whole, otherwise reached by reading."""

import os
import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.checkpoint.record import Record
from ctl_core.compat import find_inputs, list_stages, read_position, restore_position
from ctl_core.model.state import State
from ctl_core.numerics.randomness import find_random_ops
from ctl_core.run.console import Console
from ctl_core.run.errors import format_error

# What reading a file that is cut short, altered or gone raises.
UNREADABLE = (tf.errors.OpError, RuntimeError, IndexError)
# Stages that draw random numbers, others in each pass.
_DRAWING = {"_ShuffleDataset", "_ShuffleAndRepeatDataset", "_RandomDataset"}
# Ops that draw from, or are, a state outside of the pipeline.
_STATEFUL = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless", "RngReadAndSkip"})
# What a saved position has of a stage that draws, or of a cache that is full. A stage's state is a
# variant, whose metadata are its length, in one byte or two, and the names of the stage and of its
# keys: what is in a buffer, as the texts of a user's, is none of these.
_DRAWS = re.compile(
    rb"tensorflow::Iterator\x12..?Iterator::[^@\x00-\x1f]*"
    rb"(:Shuffle@@|:ShuffleAndRepeat@@|:Random@@|@@[\w@]*cache_completed)",
    re.DOTALL,
)


class InputPosition:
    """This process's position in the training data.

    Of a reader in Python, it is a text in the record; otherwise a file beside it.
    """

    def __init__(self, state: State, console: Console) -> None:
        self._state, self._console = state, console
        reader = state.data.reader
        self._why_not = reader.why_not if reader else find_outside_state(state.data.dataset)

    def describe(self) -> dict[str, Any]:
        """Returns what a position belongs to; a number of devices is not part of it."""
        config, data = self._state.config, self._state.data
        return {
            "batch_size": config.batch_size,
            "last_batch": config.last_batch,
            "overfit_batches": config.overfit_batches,
            "batches_read_at_once": 0 if data.reader else data.unit,
            "whole": 0 if data.shape.by_rows else data.shape.shares,
            "folder": os.getcwd(),
        }

    def take(self, record: Record) -> list[tf.Tensor]:
        """Notes the position in the record, if that is a text; returns what ``write`` writes."""
        why, data = self._why_not, self._state.data
        try:
            if why is None and data.reader:
                record.reader, record.input_saved = data.reader.write_position(), True
            elif why is None:
                return [*(one.read_value() for one in data.held), read_position(data.source)]
        except (ValueError, tf.errors.FailedPreconditionError) as error:
            why = format_error(error, 120)
        if why is not None:
            self._console.warn(
                f"the position in the training data cannot be saved exactly ({why}); a resumed "
                "run will read and drop. For random changes to examples, see ctl.data.with_seeds."
            )
        return []

    def write(self, taken: list[tf.Tensor], record: Record, prefix: Path) -> None:
        """Writes what ``take`` returned, and notes in the record whether it is whole."""
        if taken:
            tf.raw_ops.SaveV2(tensors=taken, **_name_tensors(prefix, len(taken)))
            record.input_saved = has_draws(prefix, self._state.data.dataset)

    def restore(self, record: Record, prefix: Path) -> None:
        """Goes to the position of a record, by reading and dropping if need be."""
        data, examples = self._state.data, record.progress["examples"]
        why = self._find_obstacle(record)
        try:
            if why is None and data.reader:
                why = data.reader.go_to(record.reader)
            elif why is None:
                self._read(prefix)
        except UNREADABLE:
            why = "the saved position does not fit the data any more, or its file is damaged"
        if self._state.cluster.agree(why is None):
            return
        self._console.warn(
            f"the position in the training data is reached by reading and dropping {examples} "
            f"examples, since {why or 'another process cannot read the position that it saved'}."
        )
        data.begin_anew(skip=examples)

    def _read(self, prefix: Path) -> None:
        data = self._state.data
        types = [*(variable.dtype for variable in data.held), tf.variant]
        parts = tf.raw_ops.RestoreV2(dtypes=types, **_name_tensors(prefix, len(types)))
        for variable, value in zip(data.held, parts, strict=False):
            variable.assign(value)
        restore_position(data.source, parts[-1])

    def _find_obstacle(self, record: Record) -> str | None:
        """Returns why the saved position is not that of this run, if it is not."""
        if not record.input_saved:
            return "no whole position could be saved"
        here, folder = self.describe(), record.input["folder"]
        for name, value in record.input.items():
            if name != "folder" and here.get(name) != value:
                return f"it was saved with {name} {value}"
        # Nobody can look into it: what a buffer holds may be compressed.
        stages = [] if self._state.data.reader else list_stages(self._state.data.dataset)
        parts = tf.nest.flatten([stage.element_spec for stage in stages])
        if folder != here["folder"] and any(getattr(p, "dtype", 0) == tf.string for p in parts):
            return f"it may name files of {folder}, where the run was before"
        return None


def _name_tensors(prefix: Path, number: int) -> dict[str, Any]:
    names, whole = [str(index) for index in range(number)], [""] * number
    return {"prefix": str(prefix), "tensor_names": names, "shape_and_slices": whole}


def find_outside_state(dataset: tf.data.Dataset) -> str | None:
    """Says what of a pipeline keeps a state outside of it, or returns None.

    TensorFlow refuses to save such a stage, but only while it is at work; and waits for ever where
    it restores a mixture (``sample_from_datasets``) of which a dataset has ended.
    """
    for stage in list_stages(dataset):
        if getattr(stage, "_stop_on_empty_dataset", True) is False:
            ends = [
                part.cardinality() != tf.data.INFINITE_CARDINALITY for part in find_inputs(stage)
            ]
            if any(ends[1:]):  # after what chooses among them
                return "it mixes datasets that end; repeat each, or give stop_on_empty_dataset=True"
        for function in stage._functions():
            if found := find_random_ops(function.function.graph, _STATEFUL):
                return f"it runs {', '.join(found)}, which has a state of its own"
    return None


def has_draws(prefix: Path, dataset: tf.data.Dataset) -> bool:
    """Returns whether a saved position holds the state of each stage that draws random numbers.

    TensorFlow leaves out one that has been read to its end while a stage behind it, such as
    rebatch or prefetch, still holds elements; restored, the next pass would have the order of the
    first one again. So it is with a cache in memory, which then fills itself anew. What is in a
    cache is not drawn again.
    """

    def count(stage: Any) -> int:
        draws = sum(map(count, find_inputs(stage)))
        if type(stage).__name__ == "CacheDataset":
            return min(draws, 1) if stage._filename == "" else 0
        return draws + (type(stage).__name__ in _DRAWING)

    wanted = count(dataset)
    file = Path(f"{prefix}.data-00000-of-00001")
    return not wanted or len(_DRAWS.findall(file.read_bytes())) >= wanted
