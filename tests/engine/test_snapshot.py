"""Checkpoints written in the background hold what the variables were when they were due."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.errors import RunError
from ctl_core.numerics.staging import Background
from tests.helpers.cases import FEATURES, make_hooks
from tests.helpers.fixtures import Train


class Late(Background):
    """Starts no sooner than somebody waits: training has long changed every variable by then."""

    starts: ClassVar[list[Callable[[], object]]] = []

    def start(self, function: Callable[[], object]) -> None:
        self.starts.append(function)
        self._late = function

    def wait(self) -> None:
        if late := self.__dict__.pop("_late", None):
            super().start(late)
        super().wait()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[Late]:
    """Checkpoints are written as late as can be."""
    monkeypatch.setattr(Late, "starts", [])
    monkeypatch.setattr("ctl_core.checkpoint.Background", Late)
    return Late


def model_of_many_kinds() -> keras.Model:
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(8)(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.3, seed=5)(hidden)
    nested = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    return keras.Model(inputs, keras.layers.Dense(1)(nested(hidden)))


def values_of(train_model: Any, optimizer: Any, lr: Any) -> list[np.ndarray]:
    """Everything but the states of random generators, which are in the engine's part."""
    variables = [v for v in train_model.variables if "seed" not in v.path]
    return [np.array(v.numpy()) for v in [*variables, *optimizer.variables, lr]]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.slow
def test_a_late_written_checkpoint_holds_the_values_of_its_step(
    train: Train, late: type[Late], replicas: int
) -> None:
    seen: dict[int, list[np.ndarray]] = {}

    def note(step: int, train_model: Any, optimizer: Any, lr: Any) -> None:
        lr.assign(0.01 / step)
        seen[step] = values_of(train_model, optimizer, lr)

    hooks = make_hooks(create_model=model_of_many_kinds, every_steps={4: note})
    settings = {"ckpt_every": 4, "virtual_devices": replicas}
    state = train(hooks, steps=24, **settings)
    assert len(late.starts) == 4  # all but the first two
    restored = tf.train.Checkpoint(
        step=tf.Variable(0, dtype=tf.int64),
        lr=state.lr,
        optimizer=state.optimizer,
        train_model=state.train_model,
    )
    for step in (12, 16, 20):
        status = restored.restore(str(state.run_dir / "ckpt" / f"ckpt-{step}"))
        status.assert_consumed()
        assert int(restored.step) == step
        if replicas == 1:  # with several, batch normalisations are averaged to be saved
            values = values_of(state.train_model, state.optimizer, state.lr)
            for value, expected in zip(values, seen[step], strict=True):
                np.testing.assert_array_equal(value, expected)
    # A run that begins where the background left off is the same run.
    short = train(hooks, steps=16, run_name="b", **settings)
    assert short.step == 16
    again = train(hooks, steps=24, run_name="b", **settings)
    whole = train(hooks, steps=24, **settings)  # restores the last checkpoint
    for one, other in zip(again.train_model.variables, whole.train_model.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("last", [8, 12])
def test_a_failure_in_the_background_is_told_by_its_step(
    train: Train, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """At the next step that the loop looks, or at the end of the run."""
    write = tf.train.Checkpoint.write

    def full(self: Any, path: str, options: Any = None) -> Any:
        if str(path).endswith("engine/ckpt-8"):
            assert threading.current_thread() is not threading.main_thread()
            raise OSError(28, "No space left on device")
        return write(self, path, options)

    monkeypatch.setattr(tf.train.Checkpoint, "write", full)
    with pytest.raises(RunError, match=r"the checkpoint of step 8 cannot .* No space left .* kept"):
        train(make_hooks(every_steps={1: lambda loss: None}), steps=last, ckpt_every=2)
    monkeypatch.undo()
    assert train(make_hooks(), steps=6).step == 6


def test_a_failing_hook_leaves_the_checkpoint_that_was_being_written(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, failing = threading.Event(), threading.Event()
    write = tf.train.Checkpoint.write

    def slowly(self: Any, path: str, options: Any = None) -> Any:
        if str(path).endswith("engine/ckpt-6"):
            reached.set()
            assert failing.wait(600)
        return write(self, path, options)

    def fail() -> None:
        assert reached.wait(600)
        failing.set()
        raise ValueError("mine")

    monkeypatch.setattr(tf.train.Checkpoint, "write", slowly)
    with pytest.raises(RunError, match="mine"):
        train(make_hooks(at_step={7: fail}), steps=20, ckpt_every=2)
    assert (tmp_path / "runs/run/ckpt/engine/ckpt-6.json").exists()
