"""A run that is only read: its state, built on one device, and a checkpoint restored into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from ctl_core.build import create_state, process_state
from ctl_core.checkpoint import Checkpoints
from ctl_core.cluster.task import Task
from ctl_core.console import Console
from ctl_core.run.folder import Run, open_session
from ctl_core.settings import Config
from ctl_core.sources import Source
from ctl_core.state import State

CheckpointName = int | Literal["best"] | None


@contextmanager
def open_run(
    callbacks: Any, config: Config, console: Console | None = None
) -> Iterator[tuple[State, Run, Console]]:
    """Builds the state of a run that is only read, on one device."""
    console = console or Console()
    config = dataclasses.replace(config, strategy="one_device", virtual_devices=1, workers=1)
    # Nobody need count the training data.
    config = dataclasses.replace(config, steps=None, epochs=None, ckpt_every=0, eval_every=0)
    run = Run(config, Task(), reading=True)
    with open_session(run, console), process_state(config):
        yield create_state(callbacks, config, run, console), run, console


@contextmanager
def restore_run(
    callbacks: Any, config: Config, checkpoint: CheckpointName, console: Console | None = None
) -> Iterator[tuple[State, Console]]:
    """Builds the state of a run and restores a checkpoint; the weights are averaged with ``ema``.

    Args:
        callbacks: the hooks
        config: the settings of the run
        checkpoint: its step, ``best`` for the one that ``keep_best`` keeps, or None for the newest
        console: where to say so

    Raises:
        SetupError: there is none, or it does not fit.
    """
    with open_run(callbacks, config, console) as (state, run, console):
        Source("checkpoint", run.path, checkpoint).find_step()
        Checkpoints(state, console).restore(checkpoint, with_input=False)
        console.say(f"{run.shown}: checkpoint of step {state.step}.")
        yield state, console
