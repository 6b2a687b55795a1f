"""``train --check``: one device beside three, then everything once, in a temporary folder.

A mistake in a hook that is due at step 10000 thus shows before the first step of the run. The run
itself, if it is there, is neither read nor locked.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.batches import widths_vary
from ctl_core.build import create_state
from ctl_core.checks.devices import Values, check_traces, describe_differences, observe
from ctl_core.checks.ratio import check_losses
from ctl_core.cluster.signals import Signals
from ctl_core.cluster.strategy import prepare, task_of
from ctl_core.cluster.sync import peers
from ctl_core.cluster.task import Task
from ctl_core.console import LOG, Console, format_values
from ctl_core.errors import CtlError, RunError, SetupError, StopTraining, brief
from ctl_core.hooks import Hook, Hooks, load_hooks
from ctl_core.nested import output_names
from ctl_core.process_state import process_state
from ctl_core.run.folder import Run, open_session
from ctl_core.run.listeners import find_listener
from ctl_core.serving.export import save_model
from ctl_core.serving.inference import create_inference
from ctl_core.serving.predict import predict_outputs
from ctl_core.serving.restore import restore_run
from ctl_core.settings import Config
from ctl_core.sources import from_anywhere
from ctl_core.state import State
from ctl_core.summary import describe_nature, describe_parameters
from ctl_core.trainer import Trainer

# One inside a graph call of many steps, and one of which the hooks get values.
STEPS = 2
DEVICES = 3


def check(callbacks: Any, config: Config) -> State:
    """Compares devices, then tries everything that a run would do once; prints what was tried.

    On one CPU device and on three, see checks/devices.py: steps and an evaluation. Then, as the
    settings have it: two steps of training; every host hook, whenever it is due, with its own
    step; an evaluation, and the hooks after it; a checkpoint, written and read back; predictions
    and an export; the hooks at the end. Hooks that write files or call services do so.

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
    task, config = task_of(config), from_anywhere(config)
    console = _Console(shown=task.chief)
    temporary = tempfile.TemporaryDirectory(prefix="ctl_core-check-", ignore_cleanup_errors=True)
    with temporary as folder, Signals(console) as signals:
        name = config.run_name or "run"
        config = dataclasses.replace(config, runs_dir=folder, run_name=name)
        hooks, warnings = load_hooks(callbacks, config)
        for warning in warnings:
            console.warn(warning)
        console.line(f"check of {name}: all of it in a temporary folder, which is removed.")
        cannot = _split_cpu(config)
        state = _try_everything(hooks, config, console, signals)
        if state.stopped_by is not None:
            return state
        _use(hooks, config, console)
        differences = [] if cannot else list(_compare(hooks, state, config, console))
        for said in differences[1:]:
            console.warn(said)
        if differences:
            more = f" And {len(differences) - 1} more, above." * (len(differences) > 1)
            raise SetupError(f"check: {differences[0]}{more}")
        if cannot:
            console.line(f"  devices cannot be compared: {cannot}")
        console.line(f"check: all well, {time.monotonic() - begun:.1f} s")
    return state


def _split_cpu(config: Config) -> str | None:
    """Starts TensorFlow with devices to compare; returns why it cannot, or None."""
    try:
        prepare(dataclasses.replace(config, virtual_devices=max(DEVICES, config.virtual_devices)))
    except SetupError as started:  # as in a notebook
        return str(started)
    return None


def _compare(hooks: Hooks, state: State, config: Config, console: _Console) -> Iterator[str]:
    """Yields what differs between one device and three; of micro-batches, only warns."""
    share = DEVICES * config.accumulate_steps  # steps are even, the evaluation is not
    batch = max(1, config.batch_size // share) * share
    short = dataclasses.replace(_shorten(config), batch_size=batch)
    rows = (config.eval_batch_size or batch) + DEVICES - 1
    tried = dataclasses.replace(hooks, create_eval_dataset=_cut(hooks.create_eval_dataset, rows))

    def run(devices: int, micro_batches: int = 1) -> Values:
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
        of_parts = one if config.accumulate_steps == 1 else run(1, config.accumulate_steps)
    except (CtlError, tf.errors.OpError) as error:  # batches of a fixed size, say
        console.line(f"  devices cannot be compared: {brief(error)}")
        return
    console.done("devices", f"a step and an evaluation on one and on {DEVICES} were compared")
    for said in describe_differences(state, one, of_parts, "micro-batches"):
        console.warn(said)
    yield from describe_differences(state, one, three, "three")


def _shorten(config: Config) -> Config:
    return dataclasses.replace(
        config, steps=STEPS, epochs=None, ckpt_every=1, eval_every=0, profile=None, max_time=None
    )


def _try_everything(hooks: Hooks, config: Config, console: _Console, signals: Signals) -> State:
    """Trains two steps, with all host hooks."""
    run = Run(config, task_of(config))
    with open_session(run, console), process_state(config), peers(run.task):
        rehearsed = _rehearse(hooks, config, console)
        state = create_state(rehearsed, _shorten(config), run, console)
        parameters = describe_parameters(state.recording, state.train_model, state.train_loss)
        console.done(hooks.create_model, parameters)
        check_losses(state, console)
        check_traces(state)
        if nature := describe_nature(state.recording):
            console.line(f"  {nature}")
        trainer = Trainer(state, run, console, signals)
        trainer.restore()
        trainer.train()
        if number := int(state.cluster.gather([signals.received or 0]).max()):
            state.stopped_by = number
            console.line(f"check: stopped by {signal.Signals(number).name}; so far, all is well.")
        elif state.diverged:
            raise RunError(
                f"the loss of step {state.step} is not finite; learning_rate may be high."
            )
        elif hooks.at_end:
            last = tuple(_note(hook, console) for hook in hooks.at_end)
            noted = dataclasses.replace(state.hooks, at_end=last)
            state.parts = dataclasses.replace(state.parts, hooks=noted)
            trainer.at_end("done")
    return state


def _use(hooks: Hooks, config: Config, console: _Console) -> None:
    """Loads the checkpoint, evaluates, predicts and exports, each as its command does.

    Raises:
        SetupError, RunError: the model cannot be served, and a hook says that it is to be.
    """
    short = dataclasses.replace(hooks, create_eval_dataset=_cut(hooks.create_eval_dataset, 1))
    with restore_run(short, _shorten(config), None, console) as (state, _, _):
        console.done("checkpoint", "written, and read back into a run of its own")
        if state.evaluation is not None:
            state.evaluation.trace(state.recording)
            state.evaluation.evaluate()
        is_served = hooks.serve is not None or hooks.create_inference_model is not None
        try:
            inference = create_inference(state)
            for name in state.evaluation.sets if state.evaluation else ():
                predict_outputs(state, None, name)
            save_model(inference, Path(config.runs_dir) / "export")
        except (SetupError, RunError) as error:
            if is_served:
                raise
            console.line(
                f"  this model cannot be exported, which its training does not need: {error}"
            )
            return
        names = ", ".join(output_names(inference.output_spec))
        console.done("evaluate, predict, export, load", f"they give {names}")


class _Console(Console):
    """Shows what was checked, and warnings; the rest, which is of two steps, goes to the log."""

    def say(self, text: str) -> None:
        """Writes a line to the log."""
        LOG.info(text)

    def answer(self, text: str) -> None:
        """Says what a signal does."""
        super().answer(f"{text.split(':')[0]}: the check stops after what is running now.")

    def start(self, step: int, total: int, clock: object = None) -> None:
        """Begins no progress line."""

    def values(self, step: int, split: str, values: dict[str, Any]) -> None:
        """Hands values to the listeners, and shows those of the evaluation."""
        super().values(step, split, values)
        if split == "eval":
            self.done("evaluation", format_values(values))

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


def _rehearse(hooks: Hooks, config: Config, console: _Console) -> Hooks:
    """Returns the hooks with all host hooks due after the last step, each with its own number."""
    several = [*hooks.every_steps.items(), *hooks.at_step.items()]
    due = [_note(hook, console, step) for step, some in several for hook in some]
    rows = config.eval_batch_size or config.batch_size
    return dataclasses.replace(
        hooks,
        every_steps={STEPS: tuple(due)} if due else {},
        at_step={},
        after_eval=tuple(_note(hook, console) for hook in hooks.after_eval),
        at_end=(),  # called when all else is done
        create_eval_dataset=_cut(hooks.create_eval_dataset, rows),
    )


def _cut(hook: Hook | None, rows: int) -> Hook | None:
    """Returns the hook of the evaluation data, of whose datasets so many examples are left."""
    if hook is None:
        return None
    create: Callable[..., Any] = hook.function

    def cut(made: Any) -> Any:
        if isinstance(made, Mapping):
            return {name: cut(one) for name, one in made.items()}
        if not isinstance(made, tf.data.Dataset):
            return made
        parts = tf.nest.flatten(made.element_spec)
        joins = all(part.shape.rank for part in parts) and not widths_vary(made.element_spec)
        return made.rebatch(rows).take(1) if joins else made.take(2)

    @functools.wraps(create)
    def create_less(*args: Any, **kwargs: Any) -> Any:
        if "per_replica_batch_size" in kwargs:  # by which elements may be cut that are not joined
            kwargs["per_replica_batch_size"] = rows
        return cut(create(*args, **kwargs))

    return dataclasses.replace(hook, function=create_less)
