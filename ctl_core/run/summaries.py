"""TensorBoard: the values of a run, what its hooks write, and its settings on the HParams page."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.plugins.hparams import api as hp

from ctl_core.compat import GraphWriter
from ctl_core.run.listeners import Listener, find_changes
from ctl_core.settings import flatten

# What is written within this many milliseconds goes to the disk at once.
_TOGETHER = 1000
# Of the file on the HParams page: one for a run, however often it was started.
_SUFFIX = ".hparams"
# Columns of every run there, so that the page can compare all of them.
_ALWAYS = ("batch_size", "learning_rate", "lr_schedule", "warmup", "steps", "epochs", "seed")


class Summaries(Listener):
    """Writes a scalar summary per value to ``tb/SPLIT``; the writers are those of hooks, too."""

    def __init__(self, folder: Path, writes: bool = True) -> None:
        """Takes the folder ``tb`` of a run, and whether this process writes there."""
        self._folder, self._writes = folder, writes
        self._config: dict[str, Any] = {}
        self._writers: dict[str, tf.summary.SummaryWriter] = {}

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        """Keeps the settings for the end."""
        self._config = config

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        """Writes a scalar summary per value."""
        with self.writer(split).as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)

    def end(self, step: int, how: str) -> None:
        """Writes what the HParams page shows, unless training has failed.

        These are the settings that are not the defaults, and some of every run: the page shows a
        column for each name that some run has. It finds the metrics in ``train`` and ``eval`` below
        the folder.
        """
        if how == "failed":
            return
        names = {*_ALWAYS, *find_changes(self._config)}
        values = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in flatten(self._config).items()
            if name in names and value is not None
        }
        before = list(self._folder.glob(f"*{_SUFFIX}"))
        writer = tf.summary.create_file_writer(str(self._folder), filename_suffix=_SUFFIX)
        with contextlib.closing(writer), writer.as_default(step=0):
            hp.hparams(values, trial_id=self._folder.parent.name)
        for path in before:
            path.unlink()

    def writer(self, split: str) -> tf.summary.SummaryWriter:
        """Returns the summary writer of ``train`` or ``eval``, created on first use."""
        if not self._writes:
            return tf.summary.create_noop_writer()
        if split not in self._writers:
            folder = str(self._folder / split)
            writer = tf.summary.create_file_writer(folder, flush_millis=_TOGETHER)
            # TensorFlow flushes whenever an ``as_default`` ends, so after each step with a hook.
            writer.flush = lambda: None
            self._writers[split] = writer
        return self._writers[split]

    def graph_writer(self, split: str) -> tf.summary.SummaryWriter:
        """Returns the same for a graph, opened only where one writes summaries.

        Every process has the summaries in its graph, so that all round alike.
        """
        return GraphWriter(lambda: self.writer(split) if self._writes else None)

    def close(self) -> None:
        """Puts everything on the disk, as far as there is room, and closes the files."""
        for writer in self._writers.values():
            with contextlib.suppress(tf.errors.OpError):
                writer.close()
