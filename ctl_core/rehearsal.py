"""``train --check``: one step of everything, in a temporary run folder of which nothing stays.

A mistake in a hook that is due at step 10000 thus shows before the first step of the run. The run
itself, if it is there, is neither read nor locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.build import create_state
from ctl_core.checkpoint import is_summed
from ctl_core.cluster.signals import Signals
from ctl_core.cluster.strategy import task_of
from ctl_core.cluster.sync import peers
from ctl_core.console import LOG, Console
from ctl_core.errors import RunError, StopTraining
from ctl_core.hooks import Hook, Hooks, describe, load_hooks
from ctl_core.listeners import find_listener
from ctl_core.messages import last_step
from ctl_core.metric_values import worded
from ctl_core.nested import described, output_names
from ctl_core.process_state import process_state
from ctl_core.run_folder import Run, session
from ctl_core.schedule import Schedule
from ctl_core.serving.inference import create_inference
from ctl_core.settings import Config
from ctl_core.sources import from_anywhere
from ctl_core.state import State
from ctl_core.summary import describe_parameters
from ctl_core.trainer import Trainer

# One inside a graph call of many steps, and one of which the hooks get values.
STEPS = 2


def check(callbacks: Any, config: Config) -> State:
    """Tries everything that a run would do once, and prints what was tried.

    Two steps of training; every host hook, whenever it is due, with its own step; an evaluation of
    one global batch, and the hooks after it; a checkpoint, written and read back; predictions; the
    hooks at the end. Hooks that write files or call services do so.

    Args:
        callbacks: a module, or any object, with the hooks as attributes
        config: the settings of the run

    Returns:
        The state, as ``train`` returns it; of the run's folder nothing is left.

    Raises:
        SetupError, RunError: as ``train`` does; also where it would do so later.
    """
    begun = time.monotonic()
    if config.listener is not None:  # which hears nothing of a check
        find_listener(config.listener)
    task, config = task_of(config), from_anywhere(config)
    console = _Console(shown=task.chief)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ctl_core-check-", ignore_cleanup_errors=True)
        )
        run = Run(dataclasses.replace(config, runs_dir=folder), task)
        config = dataclasses.replace(config, runs_dir=folder, run_name=run.path.name)
        stack.enter_context(session(run, console))
        stack.enter_context(process_state(config))
        stack.enter_context(peers(task))
        signals = stack.enter_context(Signals(console))
        state = _try_everything(callbacks, config, run, console, signals)
        if state.stopped_by is None:
            console.line(f"check: all well, {time.monotonic() - begun:.1f} s")
    return state


def _try_everything(
    callbacks: Any, config: Config, run: Run, console: _Console, signals: Signals
) -> State:
    hooks, warnings = load_hooks(callbacks, config)
    for warning in warnings:
        console.warn(warning)
    console.line(f"check of {run.path.name}: all of it in a temporary folder, which is removed.")
    short = dataclasses.replace(
        config, steps=STEPS, epochs=None, ckpt_every=1, eval_every=0, profile=None, max_time=None
    )
    state = create_state(_rehearsed(hooks, console), short, run, console)
    _check_length(state, config, console)
    console.done(hooks.create_dataset, _described(state.data.share_spec))
    console.done(
        hooks.create_model,
        describe_parameters(state.recording, state.train_model, state.train_loss),
    )
    trainer = Trainer(state, run, console, signals)
    trainer.restore()
    trainer.train()
    if number := int(state.cluster.gather([signals.received or 0]).max()):
        state.stopped_by = number
        console.line(f"check: stopped by {signal.Signals(number).name}; so far, all is well.")
        return state
    if state.diverged:
        raise RunError(f"the loss of step {state.step} is not finite; learning_rate may be high.")
    console.done(f"{STEPS} steps", "taken")
    count = _write_and_read(state, trainer)
    console.done("checkpoint", f"written and read back, {count} variables are as they were")
    if hooks.create_eval_dataset or hooks.create_inference_model or hooks.serve:
        console.done("predictions", ", ".join(_predict(state)))
    if hooks.at_end:
        noted = dataclasses.replace(state.hooks, at_end=_noted(hooks.at_end, console))
        state.parts = dataclasses.replace(state.parts, hooks=noted)
        trainer.at_end("done")
    return state


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
            self.done("evaluation", worded(values))

    def line(self, text: str) -> None:
        """Prints a line."""
        super().say(text)

    def done(self, what: object, found: str) -> None:
        """Prints that something was checked."""
        self.line(f"  {what}: {found}")


@dataclasses.dataclass(frozen=True)
class _Rehearsed(Hook):
    """A host hook that notes that it ran; one that ends training lets the others run."""

    at: int | None
    console: _Console

    def __call__(self, **values: Any) -> Any:
        if self.at is not None:
            values["step"] = self.at
        found = f"{getattr(self.function, '__name__', self.name)} ran"
        found += "" if self.at is None else f", as after step {self.at}"
        try:
            super().__call__(**values)
        except StopTraining as asked:
            found += f"; it ends training there. {asked}".rstrip()
        self.console.done(self, found)


def _noted(
    hooks: tuple[Hook, ...], console: _Console, at: int | None = None
) -> tuple[_Rehearsed, ...]:
    return tuple(
        _Rehearsed(
            **{field.name: getattr(hook, field.name) for field in dataclasses.fields(Hook)},
            at=at,
            console=console,
        )
        for hook in hooks
    )


def _rehearsed(hooks: Hooks, console: _Console) -> Hooks:
    """Returns the hooks with all host hooks due after the last step, each with its own number."""
    several = [*hooks.every_steps.items(), *hooks.at_step.items()]
    due = [hook for step, some in several for hook in _noted(some, console, step)]
    data = hooks.create_eval_dataset
    return dataclasses.replace(
        hooks,
        every_steps={STEPS: tuple(due)} if due else {},
        at_step={},
        after_eval=_noted(hooks.after_eval, console),
        at_end=(),  # called when the checkpoint has been read back
        create_eval_dataset=data and dataclasses.replace(data, function=_shortened(data.function)),
    )


def _shortened(create: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, of whose datasets one batch a replica is left."""

    def shorten(made: Any) -> Any:
        if isinstance(made, Mapping):
            return {name: shorten(one) for name, one in made.items()}
        batches = tf.distribute.get_strategy().num_replicas_in_sync
        if isinstance(made, tf.data.Dataset):
            return made.take(batches)
        return made

    @functools.wraps(create)
    def shortened(*args: Any, **kwargs: Any) -> Any:
        return shorten(create(*args, **kwargs))

    return shortened


def _check_length(state: State, config: Config, console: Console) -> None:
    """Refuses epochs of data without an end, as the run would; counting others takes too long."""
    if state.data.source.steps_per_epoch is None and state.data.source.endless:
        last_step(dataclasses.replace(state, config=config), console)
        Schedule(state.hooks, config, STEPS)


def _described(spec: Any) -> str:
    try:
        return f"batches of {describe(spec)} for each replica"
    except ValueError:  # of unknown rank
        return f"batches of {spec} for each replica"


def _write_and_read(state: State, trainer: Trainer) -> int:
    """Restores the checkpoint of the last step into variables that were changed; compares them.

    Returns:
        How many there are.

    Raises:
        RunError: one has another value than it had.
    """
    before = {path: [p.numpy() for p in parts] for path, parts in _parts(state)}
    for _, parts in _parts(state):
        for part in parts:
            value = part.numpy()
            part.assign(~value if value.dtype == bool else value + np.ones((), value.dtype))
    trainer.restore()
    trainer.checkpoints.statistics.average()  # as it was done when training ended
    for path, parts in _parts(state):
        for part, value in zip(parts, before[path], strict=True):
            now = part.numpy()
            if now.tobytes() != value.tobytes():
                raise RunError(
                    f"{state.hooks.create_ckpt}: {path} is not what it was when the checkpoint "
                    "that was just written is read back; is it changed while it is saved, or by "
                    "an object's own restoring?"
                )
    return len(before)


def _parts(state: State) -> Iterator[tuple[str, list[Any]]]:
    """Yields the variables of a run that hold numbers: the parts that this process's replicas have.

    What is summed up when it is read is restored as the sum; how many checkpoints were saved is
    known to the chief only.
    """
    for name, variable in state.recording.variables.items():
        parts = state.strategy.experimental_local_results(variable)
        dtype = variable.dtype
        plain = variable is not state.ckpt.save_counter and not is_summed(variable)
        if plain and (dtype.is_floating or dtype.is_integer or dtype.is_bool):
            yield name, list(parts)


def _predict(state: State) -> list[str]:
    """Predicts for the first batch of each set of evaluation data, and says what came."""
    inference = create_inference(state)
    outputs = [
        inference.run_batch(next(iter(one.make())))
        for one in (state.evaluation.sets.values() if state.evaluation else ())
    ]
    return [
        f"{name} {value.shape.as_list()}"
        for output in outputs
        for name, value in output_names(output).items()
    ] or [f"{name} {described(part)}" for name, part in output_names(inference.output_spec).items()]
