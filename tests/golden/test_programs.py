"""Each program has the weights of its plain loop on any devices, even if killed and resumed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.golden import compare, engine, small
from tests.golden.catalogue import KILLED, LAST_SAVED, NAMES, SETTINGS, load_program

# All ways except the last one have shares of different sizes: 8 examples on 3 devices, in 1 or 2
# micro-batches.
WAYS: dict[str, dict[str, Any]] = {
    "three devices": {"virtual_devices": 3},
    "accumulates": {"virtual_devices": 3, "accumulate_steps": 2},
    "one device": {"virtual_devices": 1},
}


def list_ways(name: str) -> list[str]:
    """Returns the ways in which a program is trained, with micro-batches if it supports them."""
    spread = "accumulates" if load_program(name).accumulates else "three devices"
    return [spread, "one device"]


# One program of each kind. Together they take seconds, and all others several times as long.
QUICK = ("batch_norm", "embedding", "multi_task", "ragged")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name"),
    [(way, name) for way in WAYS for name in NAMES if way in list_ways(name)],
)
def test_programs_have_the_weights_of_their_plain_loops(
    train: engine.Train, way: str, name: str
) -> None:
    """On one device, programs that XLA can compile are compiled, and have the same weights."""
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


# One program of each kind. Programs whose replicas communicate in the forward pass are left out,
# because XLA cannot compile them. The Transformer, which takes half a minute to compile here, is
# compiled on one device above.
COMPILED = ("embedding", "groups", "mixed_precision", "vae", "wgan_gp")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_programs_have_the_weights_of_their_plain_loops_on_two_devices(
    train: engine.Train, name: str
) -> None:
    """The weights are the same if XLA compiles a step in two parts, around the sum over devices."""
    program = load_program(name)
    settings = SETTINGS | {"virtual_devices": 2} | program.settings | {"jit_compile": True}
    state = train(program.hooks(), **settings)
    program.assert_plain(program.weights(state), state.metrics)


@pytest.mark.parametrize("name", small.slow_but(*QUICK, of=NAMES))
def test_killed_programs_resume_bit_for_bit(train: engine.Train, runs: Path, name: str) -> None:
    """On two devices, a resumed run saves the same bits as an uninterrupted one."""
    program = load_program(name)
    settings = SETTINGS | {"virtual_devices": 2, "ckpt_every": LAST_SAVED} | program.settings

    def kill(step: int) -> None:  # noqa: ARG001  (hooks take values by name)
        engine.leave_as_killed(runs / "whole", runs / "killed")

    hooks = program.hooks()
    hooks.at_step = {**getattr(hooks, "at_step", {}), KILLED: kill}
    whole = train(hooks, **settings, run_name="whole")
    program.assert_plain(program.weights(whole), whole.metrics)
    resumed = train(program.hooks(), **settings, run_name="killed")
    assert f"resuming at step {LAST_SAVED}" in (runs / "killed/train.log").read_text()
    compare.assert_same(program.weights(resumed), program.weights(whole))
    compare.assert_same_checkpoint(runs / "killed", runs / "whole", settings["steps"])
