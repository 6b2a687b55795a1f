"""``train --check``: tries everything once in a temporary folder, and compares devices.

The run itself, if it exists, is neither read nor locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.build import create_state, prepare_process
from ctl_core.checkpoint.folder import Run, open_session
from ctl_core.cluster.replica_contexts import LoneReplica
from ctl_core.cluster.signals import Signals
from ctl_core.cluster.strategy import prepare
from ctl_core.cluster.task import Task
from ctl_core.commands.compare_devices import DEVICES, CheckConsole, compare_devices
from ctl_core.commands.use import evaluate, export, predict
from ctl_core.compat import add_called_ops, make_scratch_graph
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.hooks.load import load_hooks
from ctl_core.input.batches import Share, make_placeholders
from ctl_core.model.components import TraceContext
from ctl_core.model.forward import forward_backward
from ctl_core.model.ratio import check_losses
from ctl_core.model.state import State, count_parameters
from ctl_core.run.console import format_values
from ctl_core.run.errors import SetupError, StopTraining, format_error, read_frames
from ctl_core.run.listeners import find_listener
from ctl_core.run.settings import Config
from ctl_core.serving import load
from ctl_core.step import call_update_pre
from ctl_core.trainer import Trainer
from ctl_core.types import Callbacks

STEPS = 2


def check(callbacks: Callbacks, config: Config) -> State:
    """Tries everything that a run would do once, and compares devices.

    Takes two steps with every host hook, each called as after its own step; evaluates, saves, runs
    the hooks at the end, and each command. Then it compares steps and an evaluation on one CPU
    device with the same on three. Hooks that write files or call services do so.

    Args:
        callbacks: the hooks, as for ``train``
        config: the settings of the run

    Returns:
        The state after the two steps.

    Raises:
        SetupError: a hook cannot work, or devices differ; and everything that ``train`` raises.
        RunError: devices cannot be compared.
    """
    begun = time.monotonic()
    console = CheckConsole()
    name = config.run_name or "run"
    if config.listener is not None:  # looked up, but not told anything
        find_listener(config.listener)
    prepare(dataclasses.replace(config, virtual_devices=max(DEVICES, config.virtual_devices)))
    temporary = tempfile.TemporaryDirectory(prefix="ctl_core-check-", ignore_cleanup_errors=True)
    with temporary as folder:
        console.print(f"check of {name}: all of it in a temporary folder, which is removed.")
        config = dataclasses.replace(config, runs_dir=folder, run_name=name, limit_eval=1)
        config = dataclasses.replace(
            config, fork=None, init_from=None, init_skip=None
        )  # with fresh weights
        hooks, warnings = load_hooks(callbacks, config)  # hooks see these settings
        for warning in warnings:
            console.warn(warning)
        config = dataclasses.replace(
            config.remove_periods(), steps=STEPS, ckpt_every=1, profile=None, on_nan="stop"
        )
        state = _train(hooks, config, console)
        _use(hooks, state, config, console)
        compare_devices(hooks, config, console)
        console.print(f"check: all well, {time.monotonic() - begun:.1f} s")
    return state


def _train(hooks: Hooks, config: Config, console: CheckConsole) -> State:
    """Trains two steps; all host hooks are due after the last one."""
    rehearsal = _Rehearsal(hooks, console)
    run = Run(config, Task())
    with open_session(run, console), prepare_process(config):
        state = create_state(rehearsal.create_hooks(), config, run, console)
        console.print(f"  {hooks.create_model}: {count_parameters(state)}")
        check_losses(state, console)
        before = describe_trace(state)
        rehearsal.watch_graph_hooks(state)
        trainer = Trainer(state, run, console, Signals())
        trainer.restore()
        trainer.train()
        check_traces(state, before, rehearsal)
    return state


class _Rehearsal:
    """Calls each host hook once, and notes which Python values the hooks change.

    Attributes:
        changes: by the name of a Python value that graph hooks read, how a host hook changed it
    """

    def __init__(self, hooks: Hooks, console: CheckConsole) -> None:
        self.changes: dict[str, str] = {}
        self._hooks = hooks
        self._console = console
        self._watched: dict[str, dict[str, str]] = {}
        self._state: State | None = None

    def create_hooks(self) -> Hooks:
        """Returns hooks of which all host hooks are due after the last step."""
        hooks = self._hooks
        by_step = [*hooks.every_steps.items(), *hooks.at_step.items()]
        due = [self._rehearse(hook, step) for step, step_hooks in by_step for hook in step_hooks]
        return dataclasses.replace(
            hooks,
            every_steps={STEPS: tuple(due)} if due else {},
            at_step={},
            after_eval=tuple(map(self._rehearse, hooks.after_eval)),
            at_end=tuple(map(self._rehearse, hooks.at_end)),
        )

    def watch_graph_hooks(self, state: State) -> None:
        """Notes the Python values that graph hooks, the model and the loss can read."""
        self._state = state
        self._watched = self._read_watched()

    def _read_watched(self) -> dict[str, dict[str, str]]:
        state = self._state
        if state is None:
            return {}
        watched = {str(hook): read_memory(hook.function) for hook in self._hooks.list_graph_hooks()}
        watched[str(self._hooks.create_model)] = read_memory(state.train_model)
        watched[str(self._hooks.create_loss)] = read_memory(state.train_loss)
        return watched

    def _rehearse(self, hook: Hook, at_step: int | None = None) -> Hook:
        """Returns a host hook that is called as after its own step, and watched."""

        @functools.wraps(hook.function)
        def run(**values: Any) -> None:
            if at_step is not None and "step" in values:
                values["step"] = at_step
            ending = ""
            memory_before = read_memory(hook.function)
            watched_before = self._read_watched()
            try:
                hook.function(**values)
            except StopTraining as stop:  # the other hooks still have to run
                ending = f"; it ends training there. {stop}".rstrip()
            as_after = "" if at_step is None else f", as after step {at_step}"
            self._console.print(f"  {hook} ran{as_after}{ending}")
            watched_changes = self._note_changes(hook, watched_before)
            self._warn_of_memory(hook, memory_before, watched_changes)

        return dataclasses.replace(hook, function=run)

    def _note_changes(self, hook: Hook, before: dict[str, dict[str, str]]) -> set[str]:
        """Notes the values of graph hooks that a host hook changed; returns their names."""
        names = set()
        for reader, values in self._read_watched().items():
            for name, value in values.items():
                old_value = before.get(reader, {}).get(name, value)
                if value != old_value:
                    names.add(name)
                    self.changes[name] = (
                        f"{reader}: {name} is read only when the step is traced, so in all steps "
                        f"it stays {old_value}, although {hook} changes it to {value}; make it a "
                        "tf.Variable (in create_model) and let the hook assign that."
                    )
        return names

    def _warn_of_memory(self, hook: Hook, before: dict[str, str], ignored: set[str]) -> None:
        """Warns of Python values that a host hook keeps for itself, which no checkpoint holds."""
        after = read_memory(hook.function)
        changed = [name for name in after if after[name] != before.get(name)]
        remembered = [name for name in changed if name not in ignored]
        if remembered:
            self._console.warn(
                f"{hook} remembers {', '.join(remembered)} in Python, which no checkpoint holds; "
                "keep in state what training depends on."
            )


def read_memory(function: Any) -> dict[str, str]:
    """Returns the numbers and arrays that a function, or an object that is called, can reach.

    Those are the attributes of the object, globals, closure cells and default arguments, and the
    entries of dicts among these, by names such as ``SET['beta']``. Values that are reachable only
    through other objects are not found.
    """
    owner = getattr(function, "__self__", function)
    code = function if inspect.isroutine(function) else type(function).__call__
    held = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, tf.Module):  # private attributes are those of Keras, such as _trainable
        held = {name: value for name, value in held.items() if not name.startswith("_")}
    with contextlib.suppress(TypeError, ValueError):  # raised if it is not written in Python
        closure = inspect.getclosurevars(inspect.unwrap(code))
        held |= {**closure.globals, **closure.nonlocals}
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters.values()
        held |= {p.name: p.default for p in parameters if p.default is not p.empty}
    for name, value in list(held.items()):
        if isinstance(value, dict):
            held |= {f"{name}[{key!r}]": entry for key, entry in value.items()}
    kinds = (int, float, np.generic, np.ndarray)
    return {name: repr(value) for name, value in held.items() if isinstance(value, kinds)}


def _use(hooks: Hooks, state: State, config: Config, console: CheckConsole) -> None:
    """Evaluates, predicts, exports and loads, as the commands do; some models only train."""
    sets = state.evaluation.sets if state.evaluation else ()
    values: dict[str, float] = {}
    if sets:
        with contextlib.redirect_stdout(io.StringIO()):
            values = evaluate(hooks, config)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for name in sets:
                predict(hooks, config, dataset=name)
            export(hooks, config)
            load(Path(config.runs_dir, str(config.run_name)), callbacks=hooks)
        console.print(f"  evaluate, predict, export, load: {format_values(values) or 'well'}")
    except Exception as error:
        if hooks.serve is not None or hooks.create_inference_model is not None:
            raise
        problem = "this model cannot be exported, which its training does not need"
        console.print(f"  {problem}: {format_error(error)}")


class OpDescription:
    """An op of a trace: two traces of the same program have equal ops in the same order."""

    def __init__(self, op: tf.Operation) -> None:
        self.op = op
        self.type = op.type
        self.constant = op.get_attr("value") if op.type == "Const" else None

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, OpDescription)
        return self.type == other.type and self.constant == other.constant


def check_traces(state: State, before: list[OpDescription], rehearsal: _Rehearsal) -> None:
    """Refuses hooks whose graph is not the same whenever it is traced.

    Args:
        state: of the run
        before: describes a trace from before the host hooks ran
        rehearsal: knows what the host hooks changed

    Raises:
        SetupError: a host hook changes a Python value that the graph holds as a constant, or a hook
            draws random numbers in Python.
    """
    after = describe_trace(state)
    if find_changed_op(before, after) is None:
        return
    op = find_changed_op(after, describe_trace(state))
    if op is None:
        # Nothing is random, so a host hook has changed a value.
        if rehearsal.changes:
            raise SetupError(next(iter(rehearsal.changes.values())))
        return
    owner = state.hooks.find_owner(read_frames(op)) or state.hooks.create_model
    raise SetupError(
        f"{owner}: draws random numbers of Python or NumPy when it is traced, once for all steps; "
        "take those of tf.random or keras.random, or draw them with the data."
    )


def find_changed_op(
    trace: Iterable[OpDescription], other: Iterable[OpDescription]
) -> tf.Operation | None:
    """Returns the first op that is not the same in another trace."""
    for description, other_description in zip(trace, other, strict=False):
        if description != other_description:
            return description.op
    return None


def describe_trace(state: State) -> list[OpDescription]:
    """Traces the forward and backward pass and ``update_pre``, and describes the ops."""
    with (
        state.strategy.scope(),
        make_scratch_graph("check").as_default() as graph,
        LoneReplica(state.strategy, 0),
    ):
        share = Share(make_placeholders(state.data.share_spec))
        kept = frozenset({"output", "batch"} & {*state.hooks.update_pre.arguments})
        for turn in TraceContext(state.components).list_turns():
            contribution, variables = forward_backward(turn, 1, kept, share)
            if not state.hooks.update_pre.is_default:
                call_update_pre(turn, 1, variables, contribution, contribution)
    return [OpDescription(op) for op in add_called_ops(graph.get_operations())]
