"""SimCLR on one and two devices; tests/engine/test_cluster.py has it on two processes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.fixtures import Train
from tests.helpers.resume import assert_resumes
from tests.ported import simclr
from tests.ported.compare import BATCH, assert_close


@pytest.mark.parametrize("devices", [1, 2])
def test_weights_and_metrics_are_those_of_the_plain_loop(train: Train, devices: int) -> None:
    expected, metrics = simclr.plain()
    state = train(simclr.hooks(), virtual_devices=devices, eval_every=5, **simclr.SETTINGS)
    assert_close(state.train_model.weights, expected.weights)
    assert state.metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(state.metrics[name], value, rtol=1e-5, err_msg=name)


def test_a_resumed_run_is_the_whole_run(train: Train) -> None:
    assert_resumes(train, simclr.hooks, replicas=2, batch_size=BATCH, eval_every=4)
