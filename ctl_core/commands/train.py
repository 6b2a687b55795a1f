"""Starts or resumes the training of a run: ``ctl_core.train``."""

import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ctl_core.build import create_state
from ctl_core.checkpoint.copying import copy_to_mirror
from ctl_core.checkpoint.logical_replicas import settle_logical_replicas
from ctl_core.checkpoint.mirror import fetch_run
from ctl_core.checkpoint.source import find_start
from ctl_core.cluster.missing_gpus import explain_missing_gpus
from ctl_core.cluster.signals import Signals
from ctl_core.cluster.strategy import find_task, has_missed_sigterm
from ctl_core.cluster.sync import join_peers
from ctl_core.commands.inherited import inherit_settings
from ctl_core.compat import describe_untested, read_sources_once
from ctl_core.hooks.callbacks_file import (
    read_hooks_file,
    read_modules,
    read_sources_of_hooks,
    refuse_edited_modules,
)
from ctl_core.hooks.project_modules import keep_sources
from ctl_core.model.ratio import check_losses
from ctl_core.model.state import State
from ctl_core.run.console import Console
from ctl_core.run.files import is_stdout
from ctl_core.run.listeners import Listener, find_listener
from ctl_core.run.settings import Config
from ctl_core.session.process import prepare_process
from ctl_core.session.run import Run, open_session
from ctl_core.session.turns import PROCESS_TURN
from ctl_core.session.watch import Watch
from ctl_core.trainer import Trainer


def train(
    callbacks: Any,
    config: Config,
    go_on: bool = False,
    note: str | None = None,
    listeners: Sequence[Listener] = (),
    start_over: bool = False,
) -> State:
    """Trains a run until ``config.steps`` or ``config.epochs`` is reached.

    If the run has a checkpoint, training resumes from the newest one. If ``mirror`` is set and has
    a newer checkpoint, the run is fetched from there first.

    Args:
        callbacks: a module, or any object, with the hooks as attributes
        config: the settings of the run; if a run called ``run_name`` exists, it is resumed. If
            ``load_config`` has read the settings, a resumed run keeps its own settings, except
            those that were passed to ``load_config``. Any other ``Config`` is used as it is, and a
            line is printed for each setting that changes.
        go_on: whether to resume a run that a hook has ended with ``StopTraining``. Otherwise, such
            a run is resumed only if it now has more steps than were planned when it was ended.
        note: your expectations of the run, for its entry in training_log.md
        listeners: listeners to call in addition to the listener that the settings name
        start_over: whether to begin the run again if its checkpoints were deleted. Otherwise, such
            a run is refused. A run that has a checkpoint is resumed in any case.

    Returns:
        The trained state. ``stopped_by`` is set if a signal ended training early, ``ended`` if a
        hook ended training early, and ``diverged`` if the loss of the last step is not finite.

    Raises:
        SetupError: a setting or a hook cannot work, or this process is training another run;
            nothing was trained.
        RunError: a hook raised, or a step or a file failed; the last checkpoint stays usable.
        PeerLost: another process of the cluster is gone.
    """
    started = time.monotonic()
    refuse_edited_modules(callbacks, config.callbacks)
    task = find_task(config)
    fetch_run(inherit_settings(config)[0])
    config, notes = inherit_settings(config)  # again, because the run may have been fetched
    if task.chief:
        for line in notes:
            print(line, flush=True)
    return train_here(callbacks, config, Start(started, go_on, note, listeners, start_over))


class Start(NamedTuple):
    """How a training is started, apart from its settings; see the arguments of ``train``.

    Attributes:
        started: the time at which the command was started, from which ``max_time`` counts, by
            ``time.monotonic`` (seconds)
        go_on: whether to resume a run that a hook has ended
        note: the user's expectations of the run
        listeners: listeners to call in addition to the listener that the settings name
        start_over: whether to begin the run again if its checkpoints were deleted
    """

    started: float
    go_on: bool = False
    note: str | None = None
    listeners: Sequence[Listener] = ()
    start_over: bool = False


def train_here(callbacks: Any, config: Config, start: Start) -> State:
    """Trains a run like ``train``, but does not fetch the run from its mirror."""
    with PROCESS_TURN.train(config.run_name or "a run"):
        return train_in_turn(callbacks, config, start)


def train_in_turn(callbacks: Any, config: Config, start: Start) -> State:
    """Trains a run; the caller ensures that no other thread trains or loads one at the same time.

    The benchmarks call this function directly, because they train several runs in turns.
    """
    task = find_task(config)
    hooks_file = read_hooks_file(callbacks)
    sources = read_sources_of_hooks(callbacks, config.callbacks)
    named = [find_listener(config.listener)] if config.listener is not None else []
    config = settle_logical_replicas(config, find_start(config, start.start_over))
    run = Run(
        config,
        task,
        start.note,
        listeners=[*start.listeners, *named],
        start_over=start.start_over,
    )
    console = Console(shown=task.chief and not is_stdout(run.path / "train.log"))
    config = dataclasses.replace(config, run_name=run.path.name)  # the run may have chosen a name
    with (
        open_session(run, console),
        keep_sources(sources),
        read_sources_once(),
        copy_to_mirror(config, task, run.path, run.listeners, console),
        prepare_process(config),
        join_peers(task),
        Signals(console.say) as signals,
        Watch(run, console, signals, task, config.stall_seconds) as watch,
    ):
        for line in describe_untested():
            console.say(line)
        missing_gpus = explain_missing_gpus(config)
        if missing_gpus is not None:
            console.warn(missing_gpus)
        state = create_state(callbacks, config, run, console)
        check_losses(state, console)
        trainer = Trainer(state, run, console, signals, watch, start.started)
        with contextlib.closing(trainer):
            trainer.restore(start.go_on)
            if has_missed_sigterm():
                signal.raise_signal(signal.SIGTERM)
            modules = functools.partial(read_modules, callbacks, config.callbacks)
            trainer.train(hooks_file, modules)
    return state
