"""What a setting cannot be, as only hooks, data or devices tell; a right start then begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.project import Cli, source_of

EVALUATED = source_of(
    create_eval_dataset="""\
def create_eval_dataset(per_replica_batch_size):
    return data.batch(per_replica_batch_size)
"""
)
ENDLESS = source_of(
    create_dataset="""\
def create_dataset(per_replica_batch_size):
    return data.repeat().batch(per_replica_batch_size, drop_remainder=True)
"""
)
# What refuses it is known only with the hooks, the data or the devices.
REFUSED = {
    "a metric": (EVALUATED, ("--keep-best", "foo"), "keep_best: no metric is called 'foo'"),
    "a metric to follow": (EVALUATED, ("--early-stop", "foo:2"), "early_stop: no metric"),
    "no evaluation": (source_of(), ("--keep-best", "loss"), "keep_best: needs an evaluation"),
    "a global batch": (
        source_of(),
        ("--batch-size", "9", "--virtual-devices", "2"),
        "batch_size: 9 cannot be shared out evenly over 2",
    ),
    "a batch of evaluation": (
        EVALUATED,
        ("--eval-batch-size", "9", "--virtual-devices", "2"),
        "eval_batch_size: 9 cannot",
    ),
    "too few examples": (source_of(), ("--batch-size", "64"), "lower batch_size"),
    "epochs": (ENDLESS, ("--steps", "null", "--epochs", "1"), "epochs: create_dataset"),
    "a period": (ENDLESS, ("--ckpt-every", "1epoch"), "ckpt_every: create_dataset"),
    "weights": (source_of(), ("--init-from", "other.weights.h5"), "init_from: other.weights.h5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_cannot_be(case: str, cli: Cli) -> None:
    """No step is taken, and nothing of its settings is kept for the right start."""
    import keras

    source, flags, words = REFUSED[case]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.save_weights("other.weights.h5")
    refused = cli(source, *flags, "--seed", "5", "--note", "it learns")
    assert refused.code == 2 and words in refused.err
    assert refused.written == {"runs/a/train.log"}
    assert cli(source, "--steps", "2").code == 0
    assert "seed: 0" in Path("runs/a/config.yaml").read_text()
    assert not Path("training_log.md").exists()
