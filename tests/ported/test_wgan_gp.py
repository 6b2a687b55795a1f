"""WGAN-GP (wgan_gp.py) beside a plain loop."""

from __future__ import annotations

import pytest

from tests.helpers.fixtures import Train
from tests.helpers.resume import assert_resumes
from tests.ported.compare import BATCH, assert_close
from tests.ported.wgan_gp import SETTINGS, hooks, plain


@pytest.mark.parametrize(("devices", "accumulate"), [(1, 1), (2, 1), (2, 2)])
def test_weights_are_those_of_the_plain_loop(train: Train, devices: int, accumulate: int) -> None:
    state = train(hooks(), virtual_devices=devices, accumulate_steps=accumulate, **SETTINGS)
    assert_close(state.train_model.weights, plain().weights)


def test_a_resumed_run_is_the_whole_run(train: Train) -> None:
    assert_resumes(train, hooks, replicas=2, batch_size=BATCH)
