"""Each program has the weights of its plain loop, on any devices, killed and resumed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.golden import compare, engine
from tests.golden.catalogue import (
    KILLED,
    LAST_SAVED,
    NAMES,
    SETTINGS,
    assert_plain,
    load_program,
    train_plainly,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", [1, 4])
def test_weights_on_any_devices(train: engine.Train, name: str, devices: int) -> None:
    program = load_program(name)
    settings = SETTINGS | {"virtual_devices": devices} | program.settings
    first: list[np.ndarray] = []

    def read_first(train_model: Any, train_loss: Any, optimizer: Any) -> None:
        parts = {"train_model": train_model, "train_loss": train_loss, "optimizer": optimizer}
        first[:] = compare.read_numbers(program.weights(SimpleNamespace(**parts)))

    hooks = program.hooks()
    hooks.at_step = {**getattr(hooks, "at_step", {}), 1: read_first}
    state = train(hooks, **settings)
    assert_plain(name, program.weights(state), state.metrics)
    compare.assert_moved(first, train_plainly(name), program.ignored() | program.frozen())


@pytest.mark.parametrize("name", NAMES)
def test_killed_and_resumed(train: engine.Train, runs: Path, name: str) -> None:
    """On two devices; the resumed run is the whole one bit for bit, in all that it saves."""
    program = load_program(name)
    settings = SETTINGS | {"virtual_devices": 2, "ckpt_every": LAST_SAVED} | program.settings

    def kill(step: int) -> None:
        engine.leave_as_killed(runs / "whole", runs / "killed")

    hooks = program.hooks()
    hooks.at_step = {**getattr(hooks, "at_step", {}), KILLED: kill}
    whole = train(hooks, **settings, run_name="whole")
    assert_plain(name, program.weights(whole), whole.metrics)
    resumed = train(program.hooks(), **settings, run_name="killed")
    assert f"resuming at step {LAST_SAVED}" in (runs / "killed/train.log").read_text()
    weights = [compare.read_numbers(program.weights(state)) for state in (resumed, whole)]
    for value, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(value, other)
    compare.assert_same_checkpoint(runs / "killed", runs / "whole", settings["steps"])
