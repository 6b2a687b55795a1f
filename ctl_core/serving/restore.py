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
from ctl_core.errors import SetupError
from ctl_core.files import from_here
from ctl_core.run.folder import Run, open_session
from ctl_core.run_state.record import Record
from ctl_core.settings import Config
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
) -> Iterator[tuple[State, Record, Console]]:
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
        record = restore_weights(Checkpoints(state, console), state, checkpoint)
        if record is None:
            raise missing_checkpoint(run)
        console.say(f"{run.shown}: checkpoint of step {record.step}.")
        yield state, record, console


def restore_weights(
    checkpoints: Checkpoints, state: State, checkpoint: CheckpointName
) -> Record | None:
    """Restores a checkpoint for those who only use it; returns None if there is none at all."""
    record = checkpoints.restore(checkpoint, with_input=False)
    average = state.parts.average
    if average and record and any(name.startswith("ema/") for name in record.created):
        average.put_in()
    return record


def missing_checkpoint(run: Run) -> SetupError:
    """Says that a run has no checkpoint."""
    return SetupError(f"{from_here(run.ckpt)}: no checkpoint there yet; train the run first.")
