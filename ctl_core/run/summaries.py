"""TensorBoard: the values of a run, what its hooks write, and its settings on the HParams page."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.plugins.hparams import api as hp

from ctl_core.compat import GraphWriter
from ctl_core.errors import RunError, reason
from ctl_core.files import from_here
from ctl_core.run.listeners import Listener
from ctl_core.settings import Config, flatten

# What is written within this many milliseconds goes to the disk at once.
_TOGETHER = 1000
# Of the file on the HParams page: one for a run, however often it was started.
_SUFFIX = ".hparams"
# Columns of every run there, beside the hparams, so that the page can compare all of them.
_ALWAYS = ("batch_size", "learning_rate", "lr_schedule", "warmup", "steps", "epochs", "seed")
# No columns: they say where, how long and how watched a run is trained, and change no weight.
_LEFT_OUT = (
    *("run_name", "runs_dir", "callbacks", "listener", "debug", "profile", "workers", "strategy"),
    *("virtual_devices", "max_restarts", "max_time", "ckpt_every", "keep_best", "eval_every"),
    *("eval_batch_size", "limit_eval", "log_every", "detect_anomaly"),
)


class Summaries(Listener):
    """Writes a scalar summary per value to ``tb/SPLIT``; the writers are those of hooks, too."""

    def __init__(self, folder: Path, writes: bool = True) -> None:
        """Takes the folder ``tb`` of a run, and whether this process writes there."""
        self._folder, self._writes = folder, writes
        self._config: Mapping[str, Any] = {}
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._flushes: list[Any] = []

    def start(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Keeps the settings for the end."""
        self._config = config

    def values(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes a scalar summary per value."""
        with self.writer(split).as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)

    def end(self, step: int, how: str) -> None:
        """Writes what the HParams page shows, unless training has failed."""
        if how != "failed":
            write_hparams(self._folder, self._config)

    def writer(self, split: str) -> tf.summary.SummaryWriter:
        """Returns the summary writer of ``train`` or ``eval``, created on first use.

        Raises:
            RunError: its file cannot be written.
        """
        if split not in self._writers:
            folder = str(self._folder / split)
            try:
                writer = (
                    tf.summary.create_file_writer(folder, flush_millis=_TOGETHER)
                    if self._writes
                    else tf.summary.create_noop_writer()
                )
            except tf.errors.OpError as error:
                raise RunError(
                    f"{from_here(self._folder.parent)}: the run folder cannot be written: "
                    f"{reason(error)}; the checkpoints so far are kept."
                ) from error
            # TensorFlow flushes whenever an ``as_default`` ends, so after each step with a hook.
            self._flushes.append(writer.flush)
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
        for writer, flush in zip(self._writers.values(), self._flushes, strict=True):
            with contextlib.suppress(tf.errors.OpError):
                flush()
                writer.close()


def write_hparams(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes the settings of a run into the folder above its event files.

    These are the hparams, those that every run has, and others where they are not the default: the
    page shows a column for each name that some run has. It finds the metrics in ``train`` and
    ``eval`` below. A setting that is None is left out; a list is its text.

    Raises:
        OSError: it cannot be written; also as TensorFlow's own ``tf.errors.OpError``.
    """
    defaults = flatten(dataclasses.asdict(Config()))
    values = {
        setting: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for setting, value in flatten(dict(config)).items()
        if setting not in _LEFT_OUT and value is not None
        if setting in _ALWAYS or value != defaults.get(setting)
    }
    before = list(folder.glob(f"*{_SUFFIX}"))
    writer = tf.summary.create_file_writer(str(folder), filename_suffix=_SUFFIX)
    with contextlib.closing(writer), writer.as_default(step=0):
        hp.hparams(values, trial_id=folder.parent.name)
    for path in before:
        path.unlink(missing_ok=True)
