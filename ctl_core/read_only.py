"""Opens a run without changing it, for ``evaluate``, ``predict``, ``export`` and ``load``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ctl_core.build import create_state
from ctl_core.checkpoint.checkpoints import Checkpoints
from ctl_core.checkpoint.source import CheckpointName, choose_checkpoint
from ctl_core.cluster.task import Task
from ctl_core.model.state import State
from ctl_core.run.console import Console, create_console
from ctl_core.run.settings import Config
from ctl_core.session.process import prepare_process
from ctl_core.session.run import Run, open_session
from ctl_core.types import Callbacks


class OpenRun(NamedTuple):
    """A run that is open to be read.

    Attributes:
        state: the state of the run
        run: the folder of the run
        console: prints the messages of the run
    """

    state: State
    run: Run
    console: Console


@contextmanager
def open_run(callbacks: Callbacks, config: Config) -> Iterator[OpenRun]:
    """Builds the state of a run on one device, without restoring a checkpoint.

    The number of threads is ignored: a run can be read even if TensorFlow has started with another
    number of threads than the run was trained with.
    """
    config = dataclasses.replace(
        config, strategy="one_device", virtual_devices=1, workers=1, intra_op_threads=None
    )
    config = config.remove_periods()
    run = Run(config, Task(), reading=True)
    console = create_console()
    with open_session(run, console), prepare_process(config):
        yield OpenRun(create_state(callbacks, config, run, console), run, console)


@contextmanager
def restore_run(
    callbacks: Callbacks, config: Config, checkpoint: CheckpointName, reads_data: bool = True
) -> Iterator[tuple[State, Console]]:
    """Builds the state of a run and restores a checkpoint; with ``ema``, the averaged weights.

    Args:
        callbacks: the hooks
        config: the settings of the run
        checkpoint: the name of the checkpoint
        reads_data: see ``Checkpoints.restore``

    Raises:
        SetupError: there is no such checkpoint, or it does not fit the model.
    """
    with open_run(callbacks, config) as (state, run, console):
        source = choose_checkpoint(run.path, checkpoint)
        Checkpoints(state, console).restore(source, with_input=False, reads_data=reads_data)
        note = ""
        if source.wanted == "best" and checkpoint is None:
            note = ", the best one; use --checkpoint last for the newest"
        console.say(f"{run.shown}: checkpoint of step {state.step}{note}.")
        yield state, console
