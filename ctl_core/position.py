"""The position in the training data: saved if it is whole, otherwise reached by reading."""

from __future__ import annotations

import itertools
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.checks.position import data_files, why_not_checkpointable
from ctl_core.compat import GraphCheckpoint, inputs_of
from ctl_core.console import Console
from ctl_core.errors import brief
from ctl_core.run_state.record import Record
from ctl_core.state import State

# What reading a file that is cut short, altered or gone raises.
UNREADABLE = (tf.errors.OpError, RuntimeError, IndexError)
# What begins the state of a stage; how long its metadata are, which is one byte or two; and these.
_STAGE = re.compile(rb"tensorflow::Iterator\x12([\x00-\x7f]|[\x80-\xff][\x00-\x7f])(Iterator::)")
# Keys of a shuffle, and of a cache that is full: what is in it is not shuffled again.
_SHUFFLED = {b"epoch_num_random_samples", b"cache_completed"}
_LARGE = 64 * 2**20


class InputPosition:
    """This process's position in the training data."""

    def __init__(self, state: State, console: Console) -> None:
        self._state = state
        self._console = console
        self._made: Any = None
        reader = state.data.reader
        self._why_not = reader.why_not if reader else why_not_checkpointable(state.data.dataset)
        # Of a reader in Python, the position is a text.
        self._text: Any = tf.Variable("", dtype=tf.string, trainable=False) if reader else None

    def describe(self) -> dict[str, Any]:
        """Returns what a position belongs to; a number of devices is not part of it."""
        config, data = self._state.config, self._state.data
        return {
            "batch_size": config.batch_size,
            "per_replica_batch_size": data.source.per_replica_batch_size,
            "last_batch": config.last_batch,
            "overfit_batches": config.overfit_batches,
            "unit": 0 if data.reader else data.unit,
            "whole": data.shape.shares if data.source.whole else 0,
            "folder": os.getcwd(),
        }

    def _part(self) -> GraphCheckpoint:
        iterator = self._state.data.iterator if self._text is None else self._text
        if self._made is None or self._made.input is not iterator:
            self._made = GraphCheckpoint(input=iterator)
        return self._made  # type: ignore[no-any-return]

    def save(self, prefix: Path) -> bool:
        """Writes the position; returns whether it is there, and whole."""
        why, reader = self._why_not, self._state.data.reader
        try:
            if reader and why is None:
                self._text.assign(reader.write_position())
            if why is None:
                self._part().write(str(prefix))
        except tf.errors.FailedPreconditionError as error:
            why = brief(error, 120)
        except ValueError as error:
            why = str(error)
        if why is not None:
            self._console.warn(
                f"the position in the training data cannot be saved exactly ({why}); a resumed "
                "run will read and drop what was used. For random changes to examples, see "
                "ctl_core.data.with_seeds."
            )
            return False
        size = sum(file.stat().st_size for file in data_files(prefix))
        if size > _LARGE:
            self._console.warn(
                f"the position in the training data takes {size / 2**20:.0f} MB in every "
                "checkpoint, most of it a shuffle buffer; for data in memory, "
                "ctl_core.data.index_shuffle shuffles as well and takes next to nothing."
            )
        return holds_shuffles(prefix, self._state.data.dataset)

    def restore(self, record: Record, prefix: Path) -> None:
        """Goes to the position of a record, by reading and dropping if need be."""
        state, why = self._state, self._find_obstacle(record, prefix)
        if why is None:
            try:
                self._part().read(str(prefix))
            except UNREADABLE:
                why = "the saved position does not fit the data any more, or its file is damaged"
        if why is None and state.data.reader:
            why = state.data.reader.go_to(self._text.numpy().decode())
        if state.cluster.all(why is None):
            return
        self._console.warn(
            "the position in the training data is reached by reading and dropping "
            f"{state.progress.examples} examples, since "
            f"{why or 'another process cannot read the position that it saved'}."
        )
        state.data.begin_anew()
        state.data.skip(state.progress.examples)

    def _find_obstacle(self, record: Record, prefix: Path) -> str | None:
        """Returns why the saved position is not that of this run, if it is not."""
        if not record.input_saved:
            return "no whole position could be saved"
        here = self.describe()
        for name, there in record.input.items():
            if name == "folder" or here.get(name) == there:
                continue
            return f"it was saved with {name} {there}"
        folder = str(record.input["folder"])
        if folder != here["folder"] and any(
            os.fsencode(folder) + b"/" in file.read_bytes() for file in data_files(prefix)
        ):
            return f"it names files of {folder}, where the run was before"
        return None


def holds_shuffles(prefix: Path, dataset: tf.data.Dataset) -> bool:
    """Returns whether a saved position holds the state of each shuffle of a dataset.

    TensorFlow leaves out a shuffle that has been read to its end while a stage behind it, such as
    rebatch or prefetch, still holds elements; restored, the next pass would have the order of the
    first one again. So it is with a cache in memory, which then fills itself anew. What is in a
    cache is not shuffled again.

    The names of stages and of their states are TensorFlow's own.
    """

    def count(stage: Any) -> int:
        shuffles = sum(map(count, inputs_of(stage)))
        if type(stage).__name__ == "CacheDataset":
            return min(shuffles, 1) if stage._filename == "" else 0
        return shuffles + (type(stage).__name__ == "_ShuffleDataset")

    wanted = count(dataset)
    if not wanted:
        return True
    keys = itertools.chain(*map(read_keys, data_files(prefix)))
    return sum(key in _SHUFFLED for key in keys) >= wanted


def read_keys(file: Path) -> Iterator[bytes]:
    """Yields the keys of the state of each stage in the file of a saved position.

    A stage's state is a variant, whose metadata are its name and keys: what is in a buffer, as the
    texts of a user's, is no key.
    """
    if not file.stat().st_size:
        return
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for stage in _STAGE.finditer(data):
            low, *high = stage[1]
            length = low & 127 | (high[0] << 7 if high else 0)
            yield from data[stage.start(2) : stage.start(2) + length].split(b"@@")[1:]
