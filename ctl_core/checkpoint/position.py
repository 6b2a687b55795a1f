"""The position in the training data: saved if it is whole, otherwise reached by reading."""

import os
import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.checkpoint.record import Record
from ctl_core.compat import GraphCheckpoint, find_inputs, list_stages
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
        self._part = GraphCheckpoint(input=state.data.iterator)
        reader = state.data.reader
        self._why_not = reader.why_not if reader else find_outside_state(state.data.dataset)

    def describe(self) -> dict[str, Any]:
        """Returns what a position belongs to; a number of devices is not part of it."""
        config, data = self._state.config, self._state.data
        return {
            "batch_size": config.batch_size,
            "last_batch": config.last_batch,
            "overfit_batches": config.overfit_batches,
            "unit": 0 if data.reader else data.unit,
            "whole": data.shape.shares if data.whole else 0,
            "folder": os.getcwd(),
        }

    def save(self, record: Record, prefix: Path) -> None:
        """Writes the position, and notes in the record whether it is there, and whole."""
        why, data = self._why_not, self._state.data
        try:
            if why is None and data.reader:
                record.reader, record.input_saved = data.reader.write_position(), True
            elif why is None:
                self._part.write(str(prefix))
                record.input_saved = has_draws(prefix, data.dataset)
        except (ValueError, tf.errors.FailedPreconditionError) as error:
            why = format_error(error, 120)
        if why is not None:
            self._console.warn(
                f"the position in the training data cannot be saved exactly ({why}); a resumed "
                "run will read and drop. For random changes to examples, see ctl.data.with_seeds."
            )

    def restore(self, record: Record, prefix: Path) -> None:
        """Goes to the position of a record, by reading and dropping if need be."""
        data, examples = self._state.data, record.progress["examples"]
        why = self._find_obstacle(record)
        try:
            if why is None and data.reader:
                why = data.reader.go_to(record.reader)
            elif why is None:
                self._part.read(str(prefix))
        except UNREADABLE:
            why = "the saved position does not fit the data any more, or its file is damaged"
        if self._state.cluster.agree(why is None):
            return
        self._console.warn(
            f"the position in the training data is reached by reading and dropping {examples} "
            f"examples, since {why or 'another process cannot read the position that it saved'}."
        )
        data.begin_anew(skip=examples)
        self._part = GraphCheckpoint(input=data.iterator)

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
    return not wanted or len(_DRAWS.findall(_read(prefix))) >= wanted


def _read(prefix: Path) -> bytes:
    """Returns the values of a checkpoint that TensorFlow has written."""
    names = os.listdir(prefix.parent)  # pathlib's glob takes five times as long
    own = [name for name in names if name.startswith(f"{prefix.name}.data")]
    return b"".join(prefix.with_name(name).read_bytes() for name in own)
