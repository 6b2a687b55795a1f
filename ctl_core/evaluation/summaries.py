"""Writes the data that TensorBoard shows for a run.

These are the reported values, the summaries of hooks, the settings on the HParams page, the speed
of training, and profiles.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl_core.cluster.strategy import read_peak_memory
from ctl_core.compat import GraphWriter
from ctl_core.hooks.optimizer_groups import OptimizerGroups
from ctl_core.model.components import SINGLE_OBJECTIVE
from ctl_core.run.files import atomic_write
from ctl_core.run.listeners import Listener, find_changes

if TYPE_CHECKING:
    from ctl_core.model.state import State

# The minimum time between two measurements of the training speed (seconds).
PAUSE = 0.1


class Summaries(Listener):
    """Writes a scalar summary for each value to ``tb/SPLIT``; hooks use the same writers."""

    def __init__(self, folder: Path, writes: bool = True) -> None:
        """Prepares the writers; they open files when they are first needed.

        Args:
            folder: the folder ``tb`` of a run
            writes: whether this process writes summaries
        """
        self._folder = folder
        self._writes = writes
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._settings: dict[str, Any] = {}

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        """Removes the values of steps after ``step``, and stores the settings for later.

        If a process was killed after its last checkpoint, it has written values of later steps.
        Training takes these steps again, and writes their values again.
        """
        self._settings = config
        if not self._writes:
            return
        for split in ("train", "eval"):
            if (self._folder / split).is_dir():
                remove_later_events(self._folder / split, step)

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        """Writes a scalar summary for each value.

        TensorFlow keeps each Python number that it has converted to a tensor, so the memory would
        grow with each value. It does not keep NumPy numbers.
        """
        self._write_settings()
        if not self._writes:
            return
        with self.open_writer(split).as_default(step=tf.constant(np.int64(step))):
            for name, value in values.items():
                tf.summary.scalar(name, np.float32(value))

    def saved(self, step: int, path: Path) -> None:
        """Flushes the buffers to disk, so that a copy of the run contains every value."""
        for writer in self._writers.values():
            type(writer).flush(writer)  # the instance's own ``flush`` was replaced and does nothing

    def end(self, step: int, how: str) -> None:
        """Writes the settings of a run that reported no values, unless it failed."""
        if how != "failed":
            self._write_settings()

    def _write_settings(self) -> None:
        """Writes the settings that differ from their defaults for the HParams page.

        The settings are written only once. They replace the settings of earlier starts of the run.
        """
        if not self._settings:
            return
        from tensorboard.plugins.hparams import api  # imported here, because the import is slow

        values = find_changes(self._settings)
        for name, value in values.items():
            if not isinstance(value, bool | int | float | str):
                values[name] = json.dumps(value)
        self._settings = {}
        for path in self._folder.glob("*.hparams"):
            path.unlink()
        writer = tf.summary.create_file_writer(str(self._folder), filename_suffix=".hparams")
        with contextlib.closing(writer), writer.as_default(step=0):
            api.hparams(values, trial_id=self._folder.parent.name)

    def open_writer(self, split: str) -> tf.summary.SummaryWriter:
        """Returns the summary writer of ``train`` or ``eval``, created when it is first used."""
        if not self._writes:
            return tf.summary.create_noop_writer()
        if split not in self._writers:
            writer = tf.summary.create_file_writer(str(self._folder / split), flush_millis=1000)
            # TensorFlow would flush the writer whenever an ``as_default`` context ends, that is,
            # after each step with a hook.
            writer.flush = _do_nothing  # type: ignore[method-assign]
            self._writers[split] = writer
        return self._writers[split]

    def make_graph_writer(self, split: str) -> tf.summary.SummaryWriter:
        """Returns the summary writer for a graph; it is opened only if the graph has summaries.

        The graphs of all processes contain the summaries, even if a process does not write them.
        Otherwise, the graphs would differ, and might round differently.
        """

        def open_if_writing() -> tf.summary.SummaryWriter | None:
            if self._writes:
                return self.open_writer(split)
            return None

        return GraphWriter(open_if_writing)

    def close(self) -> None:
        """Writes everything to disk, if there is room, and closes the files."""
        for writer in self._writers.values():
            with contextlib.suppress(tf.errors.OpError):
                writer.close()


def _do_nothing() -> None:
    pass


def remove_later_events(folder: Path, step: int) -> None:
    """Removes the events after a step from the event files of a folder.

    Otherwise, TensorBoard would show these steps twice. A ``SessionLog.START`` event exists for
    this purpose, but TensorBoard ignores it for summaries of TensorFlow 2.
    """
    for file in folder.glob("events.out.tfevents.*"):
        kept = []
        is_changed = False
        for record in _read_records(file):
            if tf.compat.v1.Event.FromString(record).step <= step:
                kept.append(record)
            else:
                is_changed = True
        if is_changed:
            with atomic_write(file) as temporary, tf.io.TFRecordWriter(str(temporary)) as writer:
                for record in kept:
                    writer.write(record)


def _read_records(file: Path) -> Iterator[bytes]:
    """Yields the records of an event file, up to the first record that is incomplete.

    A process that is killed can leave an incomplete record.
    """
    with contextlib.suppress(tf.errors.DataLossError):
        for record in tf.data.TFRecordDataset(str(file)):
            yield record.numpy()


class TrainingAmount(NamedTuple):
    """The amount of training that a run has completed.

    Attributes:
        seconds: the time spent in training, without evaluations and checkpoints
        steps: the number of steps
        examples: the number of examples
    """

    seconds: float
    steps: int
    examples: int


class Pace(Listener):
    """Writes the speed of training to ``tb/train`` when values are reported.

    The names are ``progress/steps_per_second``, ``progress/examples_per_second`` and, on GPUs,
    ``progress/peak_gpu_memory_mib``. A speed is the mean since the last measurement. The time of
    evaluations and checkpoints does not count. Speeds are not written to metrics.jsonl, because
    this file must be the same no matter how often a run is resumed.
    """

    def __init__(self, state: State, summaries: Summaries) -> None:
        self._state = state
        self._summaries = summaries
        self._last_written = -PAUSE
        self._last = TrainingAmount(0.0, state.step, state.progress.examples)

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        """Writes the speed, unless the last measurement was less than ``PAUSE`` seconds ago.

        Writes nothing if no step was taken since the last measurement.
        """
        now = time.monotonic()
        amount = self._measure()
        steps = amount.steps - self._last.steps
        if steps == 0 or now - self._last_written < PAUSE:
            return
        seconds = amount.seconds - self._last.seconds
        examples = amount.examples - self._last.examples
        self._last_written = now
        self._last = amount
        progress: dict[str, float] = {}
        if seconds > 0:
            progress["progress/steps_per_second"] = steps / seconds
            progress["progress/examples_per_second"] = examples / seconds
        peak = read_peak_memory(self._state.strategy.extended.worker_devices)
        if peak is not None:
            progress["progress/peak_gpu_memory_mib"] = peak / 2**20
        self._summaries.values(self._state.step, "train", progress)

    def _measure(self) -> TrainingAmount:
        state = self._state
        seconds = state.clock.measure_training()
        return TrainingAmount(seconds, state.step, state.progress.examples)


def read_rates(state: State) -> dict[str, float]:
    """Returns the learning rate of each optimizer, by its name in the metrics.

    The name is ``learning_rate``, or ``learning_rate/NAME`` if there are several objectives. If an
    objective has several optimizers, the index is added to the names of all except the first one.
    """
    rates = {}
    for objective, optimizer in state.components.optimizers.items():
        name = "learning_rate"
        if objective != SINGLE_OBJECTIVE:
            name += f"/{objective}"
        group = [optimizer]
        if isinstance(optimizer, OptimizerGroups):
            group = optimizer.optimizers
        for index, member in enumerate(group):
            rate = np.float32(float(getattr(member, "learning_rate", state.lr)))
            suffix = f"/{index}" if index > 0 else ""
            rates[name + suffix] = float(str(rate))  # gives 0.001, not 0.0010000000474974513
    return rates


class Profile:
    """Profiles some steps for TensorBoard; profiled steps are slower.

    Attributes:
        marks: the steps after which the profile begins and ends; empty without a profile
    """

    def __init__(self, steps: str, folder: Path) -> None:
        """Prepares a profile.

        Args:
            steps: the range of steps, such as ``50:60``; empty for no profile
            folder: the folder to which the profile is written
        """
        self.marks = tuple(map(int, steps.split(":"))) if steps else ()
        self._folder = folder
        self._is_running = False

    def follow(self, step: int) -> None:
        """Starts the profile if ``step`` is in the range of steps; ends it otherwise."""
        is_due = bool(self.marks) and step in range(*self.marks)
        if is_due and not self._is_running:
            tf.profiler.experimental.start(str(self._folder))
            self._is_running = True
        elif not is_due:
            self.end()

    def end(self) -> None:
        """Ends the profile, if it is running."""
        if self._is_running:
            self._is_running = False
            tf.profiler.experimental.stop()
