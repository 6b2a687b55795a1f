"""A run's settings where TensorBoard's HParams page looks for them, beside its metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import tensorflow as tf
from tensorboard.plugins.hparams import api as hp

from ctl_core.layers import flat
from ctl_core.settings import Config

# Of the file: one for a run, however often it was started.
SUFFIX = ".hparams"
_NAMES = ("run_name", "runs_dir")


def write_hparams(folder: Path, name: str, config: Config) -> None:
    """Writes the settings of a run into the folder above its event files.

    The page finds the metrics in ``train`` and ``eval`` below it. A setting that is None is left
    out; a list is its text.

    Raises:
        OSError: it cannot be written; also as TensorFlow's own ``tf.errors.OpError``.
    """
    values = {
        setting: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for setting, value in flat(dataclasses.asdict(config)).items()
        if value is not None and setting not in _NAMES
    }
    before = list(folder.glob(f"*{SUFFIX}"))
    writer = tf.summary.create_file_writer(str(folder), filename_suffix=SUFFIX)
    with contextlib.closing(writer), writer.as_default(step=0):
        hp.hparams(values, trial_id=name)
    for path in before:
        path.unlink(missing_ok=True)
