"""What TensorBoard's HParams page is given of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.plugins.hparams import plugin_data_pb2

from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train


def test_the_settings_of_a_run_are_there_once(train: Train) -> None:
    """Also of a resumed run, of which they are the last ones; under the name of the run."""
    train(make_hooks(), run_name="a", steps=2, hparams={"width": 8, "of": {"kinds": ["a"]}})
    first = _session(train(make_hooks(), run_name="a", steps=4).run_dir)
    assert first.group_name == "a"
    values = first.hparams
    assert values["steps"].number_value == 4 and values["learning_rate"].number_value
    other = train(make_hooks(), run_name="b", steps=2, hparams={"width": 8, "of": {"kinds": ["a"]}})
    values = _session(other.run_dir).hparams
    assert values["hparams.width"].number_value == 8
    assert values["hparams.of.kinds"].string_value == '["a"]'
    assert not {"run_name", "runs_dir", "early_stop"} & {*values}


def test_columns_are_those_of_all_runs_and_what_was_changed(train: Train) -> None:
    """What only says where, how long or how often something is done is none."""
    common = {"hparams": {"width": 8}, "virtual_devices": 2, "steps": 2, "batch_size": 8}
    plain = train(make_hooks(), run_name="a", **common)
    changed = {"ema": 0.9, "last_batch": "keep", "eval_every": 1, "ckpt_every": 1, "log_every": 1}
    other = train(make_hooks(), run_name="b", **changed, learning_rate=0.5, **common)
    columns = {"hparams.width", "batch_size", "learning_rate", "lr_schedule", "warmup", "steps"}
    columns.add("seed")
    values = _session(plain.run_dir).hparams
    assert {*values} == columns
    values = _session(other.run_dir).hparams
    assert {*values} == columns | {"ema", "last_batch"}
    assert values["learning_rate"].number_value == 0.5
    assert values["last_batch"].string_value == "keep"


def _session(run: Path) -> Any:
    """Returns what the only file for the page says of a run's settings."""
    (file,) = Path(run, "tb").glob("*.hparams")
    starts = []
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "hparams"
            data = plugin_data_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)
            starts.append(data.session_start_info)
    (start,) = starts
    return start
