"""Each program has the weights of its plain loop, on any devices, killed, accumulated, compiled."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.golden import compare, engine, programs
from tests.golden.compare import BATCH, RATE, STEPS, Program

PROGRAMS: dict[str, Program] = {
    name: importlib.import_module(f"{programs.__name__}.{name}").PROGRAM
    for _, name, _ in pkgutil.iter_modules(programs.__path__)
}
SETTINGS: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE}
KILLED, LAST_SAVED = 11, 8


@functools.cache
def plain(name: str) -> list[np.ndarray]:
    return compare.read_numbers(PROGRAMS[name].plain())


def assert_plain(name: str, state: Any) -> None:
    """Compares what a program has trained, and its evaluation, with its plain loop's."""
    program = PROGRAMS[name]
    compare.assert_close(program.weights(state), plain(name), program.ignored(), program.tolerance)
    for metric, value in program.metrics().items():
        np.testing.assert_allclose(state.metrics[metric], value, rtol=1e-5, err_msg=metric)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("devices", [1, 4])
def test_weights_on_any_devices(train: engine.Train, name: str, devices: int) -> None:
    program = PROGRAMS[name]
    if devices not in program.devices:
        pytest.skip("its module says why")
    settings = SETTINGS | {"virtual_devices": devices} | program.settings
    first: list[np.ndarray] = []

    def read_first(train_model: Any, train_loss: Any) -> None:
        state = SimpleNamespace(train_model=train_model, train_loss=train_loss)
        first[:] = compare.read_numbers(program.weights(state))

    hooks = program.hooks()
    hooks.at_step = {**getattr(hooks, "at_step", {}), 1: read_first}
    assert_plain(name, train(hooks, **settings))
    compare.assert_moved(first, plain(name), program.ignored())


@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_and_resumed(train: engine.Train, runs: Path, name: str) -> None:
    """On two devices; the resumed run is the whole one bit for bit, in all that it saves."""
    program = PROGRAMS[name]
    settings = SETTINGS | {"virtual_devices": 2, "ckpt_every": LAST_SAVED} | program.settings

    def kill(step: int) -> None:
        engine.leave_as_killed(runs / "whole", runs / "killed")

    hooks = program.hooks()
    hooks.at_step = {**getattr(hooks, "at_step", {}), KILLED: kill}
    whole = train(hooks, **settings, run_name="whole")
    assert_plain(name, whole)
    resumed = train(program.hooks(), **settings, run_name="killed")
    weights = [compare.read_numbers(program.weights(state)) for state in (resumed, whole)]
    for value, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(value, other)
    compare.assert_same_checkpoint(runs / "killed", runs / "whole", STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if PROGRAMS[name].accumulates])
def test_accumulated(train: engine.Train, name: str) -> None:
    """Each update of two micro-batches, on two devices."""
    program = PROGRAMS[name]
    settings = SETTINGS | {"virtual_devices": 2, "accumulate_steps": 2} | program.settings
    assert_plain(name, train(program.hooks(), **settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if PROGRAMS[name].compiles])
def test_compiled(train: engine.Train, name: str) -> None:
    program = PROGRAMS[name]
    assert_plain(
        name, train(program.hooks(), **SETTINGS | {"jit_compile": True} | program.settings)
    )
