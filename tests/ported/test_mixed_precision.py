"""A float16 policy of the model's own (mixed_precision.py) beside a plain loop."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from ctl_core.numerics import precision
from tests.helpers.fixtures import Train
from tests.ported.compare import BATCH, RATE, STEPS, numbers
from tests.ported.mixed_precision import GROWTH, hooks, plain


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("at", [0, 6, 7])
def test_weights_are_those_of_the_plain_loop(
    train: Train, monkeypatch: pytest.MonkeyPatch, devices: int, at: int
) -> None:
    """Also of a run that is resumed, before or after the update that is skipped."""
    monkeypatch.setattr(precision, "PATIENCE", GROWTH)
    settings = {"batch_size": BATCH, "learning_rate": RATE, "virtual_devices": devices}
    if at:
        train(hooks(), steps=at, **settings)
    state = train(hooks(), steps=STEPS, **settings)
    expected, scale = plain()
    assert keras.config.dtype_policy().name == "float32"
    assert state.context.loss_scale is not None
    assert float(state.context.loss_scale.scale.numpy()) == scale != precision.INITIAL
    found = numbers(state.train_model.weights), numbers(expected.weights)
    for (name, value), (_, other) in zip(*found, strict=True):
        # Each device rounds the gradients of its examples to float16; a processor that multiplies
        # in float16 itself rounds otherwise in a graph than step by step.
        np.testing.assert_allclose(value, other, atol=1e-4, err_msg=name)
    assert int(state.optimizer.iterations.numpy()) == STEPS - 1
