"""``train --check``: everything once, in a temporary folder, and one device beside three.

A mistake in a hook that is due at step 10000 thus shows before the first step of the run. The run
itself, if it is there, is neither read nor locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.build import create_state, process_state
from ctl_core.checkpoint.folder import Run, open_session
from ctl_core.cluster.signals import Signals
from ctl_core.cluster.strategy import prepare, task_of
from ctl_core.cluster.sync import peers
from ctl_core.cluster.task import Task
from ctl_core.commands.devices import Values, check_traces, describe_differences, observe
from ctl_core.commands.use import evaluate, export, predict
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.hooks.load import load_hooks
from ctl_core.model.ratio import check_losses
from ctl_core.model.state import State, count_parameters
from ctl_core.run.console import LOG, Console, format_values
from ctl_core.run.errors import CtlError, RunError, SetupError, StopTraining, brief
from ctl_core.run.listeners import find_listener
from ctl_core.run.settings import Config
from ctl_core.serving.inference import output_names
from ctl_core.serving.load import load
from ctl_core.trainer import Trainer

STEPS = 2
DEVICES = 3


def check(callbacks: Any, config: Config) -> State:
    """Tries everything that a run would do once, and compares devices; prints what was tried.

    As the settings have it: two steps of training; every host hook, whenever it is due, with its
    own step; an evaluation, and the hooks after it; a checkpoint; the hooks at the end. Then each
    command with that checkpoint. Then steps and an evaluation on one CPU device and on three, see
    devices.py. Hooks that write files or call services do so.

    Args:
        callbacks: a module, or any object, with the hooks as attributes
        config: the settings of the run

    Returns:
        The state, as ``train`` returns it; of the run's folder nothing is left.

    Raises:
        SetupError: devices differ; and as ``train`` does.
        RunError: as ``train`` does; also where it would do so later.
    """
    begun = time.monotonic()
    if config.listener is not None:  # which hears nothing of a check
        find_listener(config.listener)
    task, name = task_of(config), config.run_name or "run"
    config = dataclasses.replace(config, fork=None, init_from=None)  # with fresh weights
    console = _Console(shown=task.chief)
    temporary = tempfile.TemporaryDirectory(prefix="ctl_core-check-", ignore_cleanup_errors=True)
    with temporary as folder, Signals(console.say) as signals:
        config = dataclasses.replace(config, runs_dir=folder, run_name=name, limit_eval=1)
        hooks, warnings = load_hooks(callbacks, config)
        for warning in warnings:
            console.warn(warning)
        console.line(f"check of {name}: all of it in a temporary folder, which is removed.")
        devices = max(DEVICES, config.virtual_devices)
        prepare(dataclasses.replace(config, virtual_devices=devices))
        state = _try_training(hooks, config, console, signals)
        if number := state.stopped_by:
            console.line(f"check: stopped by {signal.Signals(number).name}; so far, all is well.")
            return state
        _try_commands(hooks, state, config, console)
        if differences := list(_compare(hooks, state, config, console)):
            for said in differences[1:]:
                console.warn(said)
            more = f" And {len(differences) - 1} more, above." * (len(differences) > 1)
            raise SetupError(f"check: {differences[0]}{more}")
        console.line(f"check: all well, {time.monotonic() - begun:.1f} s")
    return state


def _shorten(config: Config) -> Config:
    return dataclasses.replace(
        config, steps=STEPS, epochs=None, ckpt_every=1, eval_every=0, profile=None, max_time=None
    )


def _try_training(hooks: Hooks, config: Config, console: _Console, signals: Signals) -> State:
    """Trains two steps, with all host hooks."""
    run = Run(config, task_of(config))
    with open_session(run, console), process_state(config), peers(run.task):
        rehearsed = _rehearse(hooks, console)
        state = create_state(rehearsed, _shorten(config), run, console)
        console.done(hooks.create_model, count_parameters(state))
        check_losses(state, console)
        check_traces(state)
        trainer = Trainer(state, run, console, signals)
        trainer.restore()
        trainer.train()
        state.stopped_by = state.stopped_by or signals.received
        if state.diverged and not state.stopped_by:
            raise RunError(
                f"the loss of step {state.step} is not finite; learning_rate may be high."
            )
    return state


def _try_commands(hooks: Hooks, state: State, config: Config, console: _Console) -> None:
    """Evaluates, predicts, exports and loads, as the commands do, which write to the log.

    Raises:
        SetupError, RunError: the model cannot be served, and a hook says that it is to be.
    """
    sets, log = state.evaluation.sets if state.evaluation else (), _Console()
    if sets:
        console.done("evaluate", format_values(evaluate(hooks, config, console=log)))
    try:
        for name in sets:
            predict(hooks, config, dataset=name, console=log)
        export(hooks, config, console=log)
        with contextlib.redirect_stdout(io.StringIO()):
            loaded = load(Path(config.runs_dir, str(config.run_name)), callbacks=hooks)
        names = ", ".join(output_names(loaded.output_spec))
        console.done("predict, export, load", f"the model gives {names}")
    except (SetupError, RunError) as error:
        if hooks.serve is not None or hooks.create_inference_model is not None:
            raise
        said = "this model cannot be exported, which its training does not need"
        console.line(f"  {said}: {error}")


def _compare(hooks: Hooks, state: State, config: Config, console: _Console) -> Iterator[str]:
    """Yields what differs between one device and three; of micro-batches, it only warns.

    Of an evaluation, one device has no rows.
    """
    share = DEVICES * config.accumulate_steps
    short = dataclasses.replace(
        _shorten(config),
        batch_size=max(1, config.batch_size // share) * share,
        eval_batch_size=DEVICES - 1,
        limit_eval=DEVICES,
    )
    tried = dataclasses.replace(hooks, create_eval_dataset=_cut(hooks.create_eval_dataset))

    def run(devices: int, micro_batches: int = 1) -> list[Values]:
        names = [f"CPU:{index}" for index in range(devices)]
        on_one = tf.distribute.ReductionToOneDevice()
        strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=on_one)
        if devices == 1:
            strategy = tf.distribute.OneDeviceStrategy(names[0])
        own = dataclasses.replace(short, accumulate_steps=micro_batches)
        run = Run(own, Task(), reading=True)
        with open_session(run, console), process_state(own):
            return observe(create_state(tried, own, run, console, strategy))

    try:
        one, three = run(1), run(DEVICES)
        in_parts = run(1, config.accumulate_steps) if config.accumulate_steps > 1 else one
    except (CtlError, tf.errors.OpError) as error:  # batches of a fixed size, say
        console.line(f"  devices cannot be compared: {brief(error)}")
        return
    console.done("devices", f"a step and an evaluation on one and on {DEVICES} were compared")
    for said in describe_differences(state, one, in_parts, "in micro-batches"):
        console.warn(said)
    yield from describe_differences(state, one, three, "three")


def _cut(hook: Hook | None) -> Hook | None:
    """Returns the hook of the evaluation data with two elements of two rows left.

    Of elements that are a share each, a batch has more on more devices: all see the same.
    """
    if hook is None:
        return None
    create = hook.function

    @functools.wraps(create)
    def create_less(**values: Any) -> Any:
        if "per_replica_batch_size" in values:
            values["per_replica_batch_size"] = DEVICES - 1
        made = create(**values)
        sets = made if isinstance(made, Mapping) else {"": made}
        cut = {n: s.take(2) if isinstance(s, tf.data.Dataset) else s for n, s in sets.items()}
        return cut if isinstance(made, Mapping) else cut[""]

    return dataclasses.replace(hook, function=create_less)


class _Console(Console):
    """Shows what was checked, and warnings; the rest, which is of two steps, goes to the log."""

    def say(self, text: str) -> None:
        """Writes a line to the log."""
        LOG.info(text)

    def start(self, step: int, total: int, clock: object = None) -> None:
        """Begins no progress line."""

    def line(self, text: str) -> None:
        """Prints a line."""
        super().say(text)

    def done(self, what: object, found: str) -> None:
        """Prints that something was checked."""
        self.line(f"  {what}: {found}")


def _note(hook: Hook, console: _Console, at: int | None = None) -> Hook:
    """Returns a host hook that says that it ran; one that ends training lets the others run."""
    function = hook.function

    @functools.wraps(function)
    def noted(**values: Any) -> None:
        if at is not None and "step" in values:
            values["step"] = at
        found = f"{getattr(function, '__name__', hook.name)} ran"
        found += "" if at is None else f", as after step {at}"
        try:
            function(**values)
        except StopTraining as asked:
            found += f"; it ends training there. {asked}".rstrip()
        console.done(hook, found)

    return dataclasses.replace(hook, function=noted)


def _rehearse(hooks: Hooks, console: _Console) -> Hooks:
    """Returns the hooks with all host hooks due after the last step, each with its own number."""
    several = [*hooks.every_steps.items(), *hooks.at_step.items()]
    due = [_note(hook, console, step) for step, some in several for hook in some]
    return dataclasses.replace(
        hooks,
        every_steps={STEPS: tuple(due)} if due else {},
        at_step={},
        after_eval=tuple(_note(hook, console) for hook in hooks.after_eval),
        at_end=tuple(_note(hook, console) for hook in hooks.at_end),
    )
