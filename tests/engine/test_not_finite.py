"""Losses that are NaN or infinite: said, counted, and what on_nan makes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import make_hooks, regression_data, sliced
from tests.helpers.fixtures import Train

BATCH = 16


def bad_hooks(*steps: int, **more: Any) -> SimpleNamespace:
    """Hooks whose loss is NaN in these steps of 12, for the last example of the batch."""
    inputs, target = (np.tile(part, (2, 1))[: 12 * BATCH] for part in regression_data())
    target = target.copy()
    for step in steps:
        target[step * BATCH - 1] = np.nan
    return make_hooks(create_dataset=sliced((inputs, target)), **more)


def spoken(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "settings",
    [{"virtual_devices": 2}, {"accumulate_steps": 2}, {"jit_compile": True}],
)
def test_the_first_step_is_named_and_steps_are_counted(
    train: Train, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]
) -> None:
    """Also by a run that goes on."""
    for steps in (5, 9):
        state = train(bad_hooks(3, 4, 7), steps=steps, **settings)
    assert not state.diverged
    said = spoken(capsys)
    assert said.count("the loss of step 3 is not finite; --detect-anomaly finds the op, layer") == 1
    assert "the loss was not finite in 3 of 9 steps, from 3 to 7." in said


class Root(keras.layers.Layer):
    """Has a finite value and a NaN gradient where its input is 0: 0 times infinity."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        size = tf.math.log(self.factor * tf.abs(inputs))
        return tf.where(inputs == 0.0, 0.0, size)


def test_nan_gradients_are_counted(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    inputs, target = (part.copy() for part in regression_data())
    inputs[2 * BATCH, 0] = 0.0  # in the third step

    def create_model() -> keras.Model:
        layers = [keras.Input((5,)), Root(), keras.layers.Dense(1)]
        return keras.Sequential(layers)

    hooks = make_hooks(create_dataset=sliced((inputs, target)), create_model=create_model)
    train(hooks, steps=6, virtual_devices=2)
    said = spoken(capsys)
    assert "update_pre turned NaN in gradients into 0 in 1 of 6 steps." in said
