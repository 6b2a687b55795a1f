"""WGAN-GP (wgan_gp.py) beside a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.fixtures import Train
from tests.helpers.resume import assert_resumes
from tests.ported.compare import BATCH, assert_close
from tests.ported.wgan_gp import SETTINGS, STEPS, hooks, plain


@pytest.mark.parametrize("settings", [{}, {"virtual_devices": 2}, {"jit_compile": True}], ids=str)
def test_weights_are_those_of_the_plain_loop(train: Train, settings: dict[str, object]) -> None:
    state = train(hooks(), log_every=1, **settings, **SETTINGS)
    model, penalties = plain()
    assert_close(state.train_model.weights, model.weights)
    logged = [line["penalty"] for line in state.history if line["split"] == "train"]
    assert len(logged) == STEPS
    np.testing.assert_allclose(logged, penalties, rtol=1e-4)


def test_a_resumed_run_is_the_whole_run(train: Train) -> None:
    assert_resumes(train, hooks, replicas=2, batch_size=BATCH, log_every=1)
