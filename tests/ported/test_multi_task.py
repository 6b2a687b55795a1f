"""Learnt task weights (multi_task.py) beside a plain loop."""

from __future__ import annotations

import pytest

from tests.helpers.fixtures import Train
from tests.helpers.resume import assert_resumes
from tests.ported.compare import BATCH, RATE, STEPS, assert_close
from tests.ported.multi_task import hooks, plain


@pytest.mark.parametrize(("devices", "accumulate"), [(1, 1), (2, 1), (1, 2)])
def test_weights_and_log_variances_are_those_of_the_plain_loop(
    train: Train, devices: int, accumulate: int
) -> None:
    state = train(
        hooks(), steps=STEPS, batch_size=BATCH, learning_rate=RATE, virtual_devices=devices,
        accumulate_steps=accumulate,
    )  # fmt: skip
    trained = [*state.train_model.trainable_variables, *state.train_loss.trainable_variables]
    assert_close(trained, plain())


def test_a_resumed_run_is_the_whole_run(train: Train) -> None:
    found = assert_resumes(train, hooks, replicas=2, batch_size=BATCH, learning_rate=RATE)
    assert any("log_variance" in path for path in found)
