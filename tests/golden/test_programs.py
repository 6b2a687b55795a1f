"""Each program has the weights of its plain loop: on any devices, in any way, killed, resumed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.golden import compare, engine, small
from tests.golden.catalogue import KILLED, LAST_SAVED, NAMES, SETTINGS, load_program

# Shares of different sizes in all ways but the last: 8 examples over 3 devices, in 1 or 2 parts.
WAYS: dict[str, dict[str, Any]] = {
    "three devices": {"virtual_devices": 3},
    "accumulates": {"virtual_devices": 3, "accumulate_steps": 2},
    "one device": {"virtual_devices": 1},
}


def list_ways(name: str) -> list[str]:
    """Returns the ways that a program is trained in; in micro-batches, if it can be."""
    spread = "accumulates" if load_program(name).accumulates else "three devices"
    return [spread, "one device"]


# One of each kind, in seconds: the others take several times as long together as all these.
QUICK = ("batch_norm", "embedding", "multi_task", "ragged")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name"),
    [(way, name) for way in WAYS for name in NAMES if way in list_ways(name)],
)
def test_programs_have_the_weights_of_their_plain_loops(
    train: engine.Train, way: str, name: str
) -> None:
    """On one device by XLA, if it can: what it compiles is the same step."""
    program, first = load_program(name), list[np.ndarray]()

    def read_first(train_model: Any, train_loss: Any, optimizer: Any) -> None:
        trained = {"train_model": train_model, "train_loss": train_loss, "optimizer": optimizer}
        first[:] = compare.read_numbers(program.weights(SimpleNamespace(**trained)))

    hooks = program.hooks()
    hooks.at_step = {**getattr(hooks, "at_step", {}), 1: read_first}
    settings = SETTINGS | WAYS[way] | program.settings
    settings["jit_compile"] = program.compiles and way == "one device"
    state = train(hooks, **settings)
    program.assert_plain(program.weights(state), state.metrics)
    program.assert_moved(first)


# One of each kind whose replicas exchange nothing in the forward pass, which XLA cannot compile.
COMPILED = ("embedding", "groups", "mixed_precision", "transformer", "vae", "wgan_gp")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_programs_have_the_weights_of_their_plain_loops_on_two_devices(
    train: engine.Train, name: str
) -> None:
    """Before the sum over the devices and after it, XLA computes the same step."""
    program = load_program(name)
    settings = SETTINGS | {"virtual_devices": 2} | program.settings | {"jit_compile": True}
    state = train(program.hooks(), **settings)
    program.assert_plain(program.weights(state), state.metrics)


@pytest.mark.parametrize("name", small.slow_but(*QUICK, of=NAMES))
def test_killed_programs_resume_bit_for_bit(train: engine.Train, runs: Path, name: str) -> None:
    """On two devices; the resumed run is the whole one bit for bit, in all that it saves."""
    program = load_program(name)
    settings = SETTINGS | {"virtual_devices": 2, "ckpt_every": LAST_SAVED} | program.settings

    def kill(step: int) -> None:
        engine.leave_as_killed(runs / "whole", runs / "killed")

    hooks = program.hooks()
    hooks.at_step = {**getattr(hooks, "at_step", {}), KILLED: kill}
    whole = train(hooks, **settings, run_name="whole")
    program.assert_plain(program.weights(whole), whole.metrics)
    resumed = train(program.hooks(), **settings, run_name="killed")
    assert f"resuming at step {LAST_SAVED}" in (runs / "killed/train.log").read_text()
    compare.assert_same(program.weights(resumed), program.weights(whole))
    compare.assert_same_checkpoint(runs / "killed", runs / "whole", settings["steps"])
