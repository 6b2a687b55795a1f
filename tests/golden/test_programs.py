"""Each program has the weights of its plain loop on any devices, even if killed and resumed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.golden import compare, engine, small
from tests.golden.catalogue import KILLED, LAST_SAVED, NAMES, SETTINGS, load_program

# These programs have every kind of state that the others have: slots of several optimizers, a loss
# scale, a codebook, moving statistics, random numbers, all dtypes, variables that hooks change.
RESUMED = ("agent", "batch_norm", "codebook", "diffusion", "domains", "embedding",
           "every_dtype", "groups", "mixed_precision", "multi_task", "simclr", "transformer",
           "wgan_gp")  # fmt: skip
# One program of each kind. Together they take seconds, and all others several times as long.
QUICK = ("batch_norm", "embedding", "multi_task", "ragged")


# Programs that XLA cannot compile. They are trained on one device with logical replicas.
UNCOMPILED = ("every_dtype", "ragged", "recommender")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNCOMPILED])
def test_programs_have_the_weights_of_their_plain_loops_on_one_device(
    train: engine.Train, name: str
) -> None:
    """Programs that XLA can compile are compiled."""
    program = load_program(name)
    settings = SETTINGS | {"virtual_devices": 1} | program.settings
    state = train(program.hooks(), **settings, jit_compile=program.compiles)
    program.assert_plain(program.weights(state), state.metrics)


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
def test_programs_have_the_weights_of_their_plain_loops_and_resume_bit_for_bit(
    train: engine.Train, runs: Path, name: str
) -> None:
    """On three devices, in two micro-batches where the program allows this.

    The shares of 8 examples have different sizes. If a run of ``RESUMED`` is killed, it saves the
    same bits as the uninterrupted one.
    """
    program, first = load_program(name), list[np.ndarray]()
    settings = SETTINGS | {"virtual_devices": 3, "ckpt_every": LAST_SAVED} | program.settings
    if program.accumulates:
        settings |= {"accumulate_steps": 2}

    def read_first(train_model: Any, train_loss: Any, optimizer: Any) -> None:
        trained = {"train_model": train_model, "train_loss": train_loss, "optimizer": optimizer}
        first[:] = compare.read_numbers(program.weights(SimpleNamespace(**trained)))

    def kill() -> None:
        engine.leave_as_killed(runs / "whole", runs / "killed")

    hooks = program.hooks()
    hooks.at_step = {**getattr(hooks, "at_step", {}), 1: read_first, KILLED: kill}
    whole = train(hooks, **settings, run_name="whole")
    program.assert_plain(program.weights(whole), whole.metrics)
    program.assert_moved(first)
    if name not in RESUMED:
        return
    resumed = train(program.hooks(), **settings, run_name="killed")
    assert f"resuming at step {LAST_SAVED}" in (runs / "killed/train.log").read_text()
    compare.assert_same(program.weights(resumed), program.weights(whole))
    compare.assert_same_checkpoint(runs / "killed", runs / "whole", settings["steps"])
