"""Losses that are NaN or infinite: said, counted, and what on_nan makes of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.__main__ import main
from ctl_core.errors import RunError
from tests.helpers.cases import make_hooks, regression_data, sliced
from tests.helpers.fixtures import Train
from tests.helpers.project import REGRESSION

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


def test_a_loss_that_ends_not_finite(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    data = sliced(regression_data())
    hooks = bad_hooks(5, 6, create_eval_dataset=data, after_eval=lambda step: None)
    state = train(hooks, steps=6)
    assert state.diverged and state.stopped_by is None
    assert "2 of 6 steps, from 5 to 6, the last one" in spoken(capsys)
    assert train(hooks, steps=6).diverged  # nothing left to train, and no better for it
    assert not train(hooks, steps=7).diverged


def test_stop_ends_there_and_saves_nothing_after_it(train: Train, tmp_path: Path) -> None:
    asked = {6: lambda manager: manager.save()}
    hooks = bad_hooks(6, at_step=asked)
    settings = {"on_nan": "stop", "ckpt_every": 2, "virtual_devices": 2}
    with pytest.raises(RunError, match=r"loss of step 6 is not finite .*is of step 4\.") as error:
        train(hooks, steps=12, **settings)
    assert error.value.exit_code == 1
    saved = tmp_path / "runs/run/ckpt/engine"
    assert sorted(path.name for path in saved.glob("*.json")) == ["ckpt-2.json", "ckpt-4.json"]
    with pytest.raises(RunError, match="loss of step 6 is not finite"):
        train(hooks, steps=12, **settings)
    assert train(hooks, steps=12, **{**settings, "on_nan": "warn"}).step == 12


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


CALLBACKS = (
    REGRESSION
    + """

def create_loss():
    return lambda pair: tf.reduce_sum(pair[0] - pair[1], 1) / tf.zeros([])
"""
)


def test_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "callbacks.py").write_text(CALLBACKS)
    (tmp_path / "config.yaml").write_text("steps: 2\nbatch_size: 16\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--run-name", "warn"]) == 1
    assert "in 2 of 2 steps, from 1 to 2, the last one" in spoken(capsys)
    assert main(["train", "--run-name", "ignore", "--on-nan", "ignore"]) == 0
    assert main(["train", "--run-name", "stop", "--on-nan", "stop"]) == 1
    assert "error: the loss of step 1 is not finite" in capsys.readouterr().err
    assert not list((tmp_path / "runs/stop/ckpt").glob("**/*.index"))
