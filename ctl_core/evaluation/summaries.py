"""TensorBoard: values, summaries of hooks, settings on the HParams page, pace, profiles."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ctl_core.compat import GraphWriter
from ctl_core.run.files import atomic_write
from ctl_core.run.listeners import Listener, find_changes

if TYPE_CHECKING:
    from ctl_core.model.state import State

PAUSE = 0.1  # seconds between two measurements of the pace, at least


class Summaries(Listener):
    """Writes a scalar summary per value to ``tb/SPLIT``; the writers are those of hooks, too."""

    def __init__(self, folder: Path, writes: bool = True) -> None:
        """Takes the folder ``tb`` of a run, and whether this process writes there."""
        self._folder = folder
        self._writes = writes
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._settings: dict[str, Any] = {}

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        """Keeps the settings until there are values, or an end; drops the values of later steps.

        Those were written by a process that was killed, and are about to be written again.
        """
        self._settings = config
        if self._writes:
            for split in ("train", "eval"):
                if (self._folder / split).is_dir():
                    remove_later_events(self._folder / split, step)

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        """Writes a scalar summary per value."""
        self._write_settings()
        with self.open_writer(split).as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)

    def end(self, step: int, how: str) -> None:
        """Writes the settings of a run that had no values, but not where it has failed at once."""
        if how != "failed":
            self._write_settings()

    def _write_settings(self) -> None:
        """Writes, once, those that are not the defaults for the HParams page, which finds values.

        They take the place of those of an earlier start.
        """
        if not self._settings:
            return
        from tensorboard.plugins.hparams import api  # takes its time

        values = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in find_changes(self._settings).items()
        }
        self._settings = {}
        for path in self._folder.glob("*.hparams"):
            path.unlink()
        writer = tf.summary.create_file_writer(str(self._folder), filename_suffix=".hparams")
        with contextlib.closing(writer), writer.as_default(step=0):
            api.hparams(values, trial_id=self._folder.parent.name)

    def open_writer(self, split: str) -> tf.summary.SummaryWriter:
        """Returns the summary writer of ``train`` or ``eval``, created on first use."""
        if not self._writes:
            return tf.summary.create_noop_writer()
        if split not in self._writers:
            writer = tf.summary.create_file_writer(str(self._folder / split), flush_millis=1000)
            # TensorFlow flushes whenever an ``as_default`` ends, so after each step with a hook.
            writer.flush = lambda: None
            self._writers[split] = writer
        return self._writers[split]

    def make_graph_writer(self, split: str) -> tf.summary.SummaryWriter:
        """Returns the same for a graph, opened only where one writes summaries.

        Every process has the summaries in its graph, so that all round alike.
        """
        return GraphWriter(lambda: self.open_writer(split) if self._writes else None)

    def close(self) -> None:
        """Puts everything on the disk, as far as there is room, and closes the files."""
        for writer in self._writers.values():
            with contextlib.suppress(tf.errors.OpError):
                writer.close()


def remove_later_events(folder: Path, step: int) -> None:
    """Removes the events after a step from the event files of a folder.

    TensorBoard has an event for this, a session's start, but ignores it for the summaries that
    TensorFlow 2 writes: it would show those steps twice.
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
    """Yields the records of an event file, up to one that a kill has cut short."""
    with contextlib.suppress(tf.errors.DataLossError):
        for record in tf.data.TFRecordDataset(str(file)):
            yield record.numpy()


class Pace(Listener):
    """Writes how a run goes to ``tb/train``, whenever values are reported.

    These are ``progress/learning_rate`` (of several objectives ``progress/learning_rate/NAME``),
    ``progress/steps_per_second`` and ``progress/examples_per_second`` since those before,
    evaluations and checkpoints left out. They depend on the clock, or are no measurements, and so
    are not in metrics.jsonl, whose lines are the same whenever a run is resumed.
    """

    def __init__(self, state: State, summaries: Summaries) -> None:
        self._state, self._summaries = state, summaries
        self._written_at = -PAUSE
        self._before = (0.0, state.step, state.progress.examples)

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        """Writes, if that is due."""
        state, now = self._state, time.monotonic()
        reached = (state.clock.measure_training(), state.step, state.progress.examples)
        taken, steps, examples = (b - a for a, b in zip(self._before, reached, strict=True))
        if not steps or now - self._written_at < PAUSE:
            return
        self._written_at, self._before = now, reached
        made = state.components.optimizers.items()
        rates = {name: getattr(one, "learning_rate", state.lr) for name, one in made}
        paces = {f"progress/learning_rate/{n}".rstrip("/"): float(r) for n, r in rates.items()}
        if taken > 0:
            paces["progress/steps_per_second"] = steps / taken
            paces["progress/examples_per_second"] = examples / taken
        self._summaries.values(state.step, "train", paces)


class Profile:
    """Profiles steps for TensorBoard, which slows them down.

    Attributes:
        marks: it begins after the first step, and ends after the second; empty: no profile
    """

    def __init__(self, steps: str, folder: Path) -> None:
        """``steps`` is such as 50:60, or empty."""
        self.marks = tuple(map(int, steps.split(":"))) if steps else ()
        self._folder, self._running = folder, False

    def follow(self, step: int) -> None:
        """Begins or ends after a step, if it is time."""
        due = bool(self.marks) and step in range(*self.marks)
        if due and not self._running:
            tf.profiler.experimental.start(str(self._folder))
            self._running = True
        elif not due:
            self.end()

    def end(self) -> None:
        """Ends the profile, if it is running."""
        if self._running:
            self._running = False
            tf.profiler.experimental.stop()
