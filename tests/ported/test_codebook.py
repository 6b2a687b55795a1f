"""A VQ-VAE whose codebook is a moving average, after Keras' example and van den Oord et al. 2017.

The codebook is no trained variable: the layer assigns to it in ``call``, what all replicas have
found. On two processes it is tested in tests/engine/test_cluster.py, whose cluster runs already.
"""

from __future__ import annotations

import numpy as np
import pytest

import ctl_core
from tests.helpers.fixtures import Train
from tests.helpers.resume import assert_resumes
from tests.ported.codebook import BATCH, SETTINGS, STEPS, hooks, plain
from tests.ported.compare import assert_close


@pytest.mark.parametrize("devices", [1, 2])
def test_weights_and_codes_are_those_of_the_plain_loop(train: Train, devices: int) -> None:
    expected, loss = plain()
    state = train(hooks(), steps=STEPS, virtual_devices=devices, **SETTINGS)
    assert_close(state.train_model.weights, expected.weights)
    np.testing.assert_allclose(state.metrics["loss"], loss, rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_resumed_run_is_the_whole_run(train: Train, devices: int) -> None:
    found = assert_resumes(train, hooks, replicas=devices, batch_size=BATCH)
    assert any(path.endswith("codebook/codes") for path in found)


def test_codes_that_replicas_do_not_exchange_are_refused(train: Train) -> None:
    alone = hooks(exchange=lambda values: values)
    assert train(alone, steps=1, **SETTINGS).step == 1
    with pytest.raises(ctl_core.SetupError, match=r"codebook.py:\d+: assigns to train_model/cod"):
        train(alone, steps=2, virtual_devices=2, **SETTINGS)


def test_codes_that_each_micro_batch_moves_are_pointed_out(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(hooks(), steps=1, virtual_devices=2, accumulate_steps=2, **SETTINGS)
    said = " ".join(capsys.readouterr().out.split())
    for name in ("codes", "counts", "sums"):
        assert f"assigns to train_model/codebook/{name} (of the layer 'codebook', Codebook)" in said
