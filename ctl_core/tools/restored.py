"""A run that is only read: its state, and a checkpoint restored into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from ctl_core.build import create_state
from ctl_core.checkpoint import Checkpoints
from ctl_core.cluster.strategy import count_gpus, joined
from ctl_core.cluster.task import Task
from ctl_core.console import Console
from ctl_core.errors import SetupError
from ctl_core.files import from_here
from ctl_core.process_state import process_state
from ctl_core.run_folder import Run, session
from ctl_core.run_state.record import Record
from ctl_core.settings import Config
from ctl_core.state import State

Devices = Literal["one", "all"]


@contextmanager
def restored(
    callbacks: Any,
    config: Config,
    checkpoint: int | Literal["best"] | None = None,
    console: Console | None = None,
    devices: Devices = "one",
) -> Iterator[tuple[State, Record, Console]]:
    """Builds the state of a run and restores a checkpoint; the weights are averaged.

    Args:
        callbacks: the hooks
        config: the settings of the run
        checkpoint: its step, or the one that ``keep_best`` keeps; default: the newest
        console: where to say so
        devices: on one, or on all of this process as the settings have them

    Raises:
        SetupError: there is none, or it does not fit.
    """
    with built(callbacks, config, console, devices) as (state, run, console):
        record = Checkpoints(state, console).restore(checkpoint, with_input=False)
        if record is None:
            raise SetupError(
                f"{from_here(run.ckpt)}: no checkpoint there yet; train the run first."
            )
        if state.context.average and record.holds("ema"):
            state.context.average.put_in()
        console.say(f"{run.shown}: checkpoint of step {record.step}.")
        yield state, record, console


@contextmanager
def built(
    callbacks: Any, config: Config, console: Console | None = None, devices: Devices = "one"
) -> Iterator[tuple[State, Run, Console]]:
    """Builds the state of a run that is only read; ``devices`` is as above."""
    console = console or Console()
    config = on_one_device(config) if devices == "one" else on_this_machine(config, console)
    config = dataclasses.replace(
        config,
        workers=1,
        # Nobody need count the training data.
        steps=None,
        epochs=None,
        ckpt_every=0,
        eval_every=0,
    )
    run = Run(config, Task(), reading=True)
    with session(run, console), process_state(config):
        yield create_state(callbacks, config, run, console), run, console


def on_one_device(config: Config) -> Config:
    """Returns the settings for one device."""
    return dataclasses.replace(config, strategy="one_device", virtual_devices=1, workers=1)


def on_this_machine(config: Config, console: Console) -> Config:
    """Returns the settings for all devices of this process; for one, where that cannot be.

    A run of a cluster is used in one process; GPUs need not be as many as it was trained on.
    """
    if joined():  # TensorFlow's devices are those of a cluster
        return on_one_device(config)
    config = dataclasses.replace(config, workers=1)
    if config.strategy == "multi_worker":
        config = dataclasses.replace(config, strategy="auto")
    gpus = count_gpus() if config.virtual_devices == 1 else 0
    if (
        gpus > 1
        and config.strategy != "one_device"
        and config.batch_size % (gpus * config.accumulate_steps)
    ):
        console.say(
            f"batch_size: {config.batch_size} cannot be shared out evenly over {gpus} GPUs, so one "
            "is used."
        )
        return on_one_device(config)
    return config
