"""A run's settings where TensorBoard's HParams page looks for them, beside its metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import tensorflow as tf
from tensorboard.plugins.hparams import api as hp

from ctl_core.layers import flatten
from ctl_core.settings import Config

# Of the file: one for a run, however often it was started.
SUFFIX = ".hparams"
# Columns of every run, beside the hparams, so that the page can compare all of them.
_ALWAYS = ("batch_size", "learning_rate", "lr_schedule", "warmup", "steps", "epochs", "seed")
# No columns: they say where, how long and how watched a run is trained, and change no weight.
_LEFT_OUT = (
    *("run_name", "runs_dir", "callbacks", "listener", "debug", "profile", "workers", "strategy"),
    *("virtual_devices", "max_restarts", "max_time", "ckpt_every", "keep_best", "eval_every"),
    *("eval_batch_size", "limit_eval", "log_every", "detect_anomaly"),
)


def write_hparams(folder: Path, name: str, config: Config) -> None:
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
        for setting, value in flatten(dataclasses.asdict(config)).items()
        if setting not in _LEFT_OUT and value is not None
        if setting in _ALWAYS or value != defaults.get(setting)
    }
    before = list(folder.glob(f"*{SUFFIX}"))
    writer = tf.summary.create_file_writer(str(folder), filename_suffix=SUFFIX)
    with contextlib.closing(writer), writer.as_default(step=0):
        hp.hparams(values, trial_id=name)
    for path in before:
        path.unlink(missing_ok=True)
