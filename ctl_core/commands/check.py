"""``train --check``: tries everything once, in a temporary folder, and compares devices.

Two steps are rehearsed with all host hooks, an evaluation, a checkpoint and the other commands.
Then compare_devices.py compares one device with three, compare_bits.py compares their bits if there
are logical replicas, and python_values.py finds values in Python
that host hooks change in vain. The run itself, if it exists, is neither read nor locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.build import create_state
from ctl_core.cluster.replica_contexts import LoneReplica
from ctl_core.cluster.signals import Signals
from ctl_core.cluster.strategy import prepare
from ctl_core.cluster.task import Task
from ctl_core.commands.check_console import CheckConsole
from ctl_core.commands.compare_bits import compare_bits
from ctl_core.commands.compare_devices import DEVICES, compare_devices
from ctl_core.commands.compare_graphs import find_difference
from ctl_core.commands.python_values import (
    Change,
    ValueWatch,
    find_frozen_values,
    list_graph_places,
)
from ctl_core.commands.use import evaluate, export, predict
from ctl_core.compat import add_called_ops, make_scratch_graph
from ctl_core.compilation import explain_for_gpu
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.hooks.load import load_hooks
from ctl_core.input.batches import Share, make_placeholders
from ctl_core.model.components import TraceContext
from ctl_core.model.forward import forward_backward
from ctl_core.model.ratio import check_losses
from ctl_core.model.state import State
from ctl_core.run.console import format_values
from ctl_core.run.errors import SetupError, StopTraining, format_error, read_frames
from ctl_core.run.listeners import find_listener
from ctl_core.run.settings import Config
from ctl_core.serving import load
from ctl_core.session.messages import count_parameters
from ctl_core.session.process import prepare_process
from ctl_core.session.run import Run, open_session
from ctl_core.trainer import Trainer
from ctl_core.types import Callbacks

STEPS = 2


def check(callbacks: Callbacks, config: Config) -> State:
    """Tries everything that a run would do once, and compares devices.

    Takes two steps, after which every host hook runs as after the step that it is meant for;
    evaluates, saves, runs the hooks at the end, and each command. Then it takes steps and evaluates
    on one CPU device and on three, and with logical replicas once more, to compare bits. Hooks that
    write files or call services do so.

    Returns:
        The state of the rehearsed run.

    Raises:
        SetupError: devices differ, or a host hook changes a value that a graph does not read again.
        RunError: devices cannot be compared.
        CtlError: whatever ``train`` raises.
    """
    start = time.monotonic()
    console = CheckConsole()
    name = config.run_name or "run"
    if config.listener is not None:  # it is not told of a check
        find_listener(config.listener)
    prepare(dataclasses.replace(config, virtual_devices=max(DEVICES, config.virtual_devices)))
    temporary = tempfile.TemporaryDirectory(prefix="ctl_core-check-", ignore_cleanup_errors=True)
    with temporary as folder:
        console.print("check: everything is in a temporary folder, which is removed at the end.")
        config = dataclasses.replace(config, runs_dir=folder, run_name=name, limit_eval=1)
        # With fresh weights.
        config = dataclasses.replace(config, fork=None, init_from=None, init_skip=None)
        hooks, warnings = load_hooks(callbacks, config)  # hooks see the settings of the run
        for warning in warnings:
            console.warn(warning)
        config = dataclasses.replace(
            config.remove_periods(), steps=STEPS, ckpt_every=1, profile=None, on_nan="stop"
        )
        state = Rehearsal(hooks, config, console).run()
        _use(hooks, state, config, console)
        # A value may have the same bits on any number of devices, and still be no sum.
        plain_config = dataclasses.replace(config, logical_replicas=None)
        compare_devices(hooks, plain_config, console, state.data.shape.by_rows)
        compare_bits(hooks, config, console)
        console.print(f"check: all well, {time.monotonic() - start:.1f} s")
    return state


class Rehearsal:
    """A run of two steps, after the last of which all host hooks are due."""

    def __init__(self, hooks: Hooks, config: Config, console: CheckConsole) -> None:
        self._config = config
        self._console = console
        self._changes: list[Change] = []
        self._state: State | None = None
        self._hooks = self._make_all_due(hooks)

    def run(self) -> State:
        """Trains, and judges the values in Python that host hooks have changed.

        Raises:
            SetupError: a graph has kept the old value.
        """
        config = self._config
        console = self._console
        run = Run(config, Task())
        with open_session(run, console), prepare_process(config):
            state = create_state(self._hooks, config, run, console)
            self._state = state
            console.print(f"  {self._hooks.create_model}: {count_parameters(state)}")
            check_losses(state, console)
            check_traces(state)
            trainer = Trainer(state, run, console, Signals())
            trainer.restore()
            trainer.train()
            console.print(f"  {explain_for_gpu(state)}")
            self._judge_changes(state)
        return state

    def _make_all_due(self, hooks: Hooks) -> Hooks:
        """Returns the hooks of the rehearsal, each with the step number that it is meant for."""
        due = []
        for schedule in (hooks.every_steps, hooks.at_step):
            for step, functions in schedule.items():
                due += [self._rehearse(hook, step) for hook in functions]
        return dataclasses.replace(
            hooks,
            every_steps={STEPS: tuple(due)},
            at_step={},
            after_eval=tuple(map(self._rehearse, hooks.after_eval)),
            at_end=tuple(map(self._rehearse, hooks.at_end)),
        )

    def _rehearse(self, hook: Hook, step: int | None = None) -> Hook:
        """Returns a host hook that says that it ran, and whose changes in Python are noticed."""

        @functools.wraps(hook.function)
        def run(**values: Any) -> None:
            when = ""
            if step is not None:
                when = f", as after step {step}"
                if "step" in values:
                    values["step"] = step
            self._run_hook(hook, values, when)

        return dataclasses.replace(hook, function=run)

    def _run_hook(self, hook: Hook, values: dict[str, Any], when: str) -> None:
        assert self._state is not None
        places = functools.partial(list_graph_places, self._state)
        watch = ValueWatch(hook, places)
        ending = ""
        try:
            hook.function(**values)
        except StopTraining as error:  # the other hooks run all the same
            ending = f"; it ends training there. {error}".rstrip()
        self._console.print(f"  {hook} ran{when}{ending}")
        self._changes += watch.list_changes()

    def _judge_changes(self, state: State) -> None:
        """Refuses changes that a graph does not notice, and warns of those no checkpoint holds."""
        frozen = find_frozen_values(state, self._changes)
        for value in frozen[1:]:
            self._console.warn(str(value))
        if frozen:
            raise SetupError(str(frozen[0]))
        names: dict[str, list[str]] = {}
        for change in self._changes:
            hook_names = names.setdefault(str(change.hook), [])
            if change.place.name not in hook_names:
                hook_names.append(change.place.name)
        for hook, hook_names in names.items():
            self._console.warn(
                f"{hook} remembers {', '.join(hook_names)} in Python, which no checkpoint holds; "
                "keep in state what training depends on."
            )


def _use(hooks: Hooks, state: State, config: Config, console: CheckConsole) -> None:
    """Evaluates, predicts, exports and loads, as the commands do; some models only train."""
    sets: Iterable[str] = ()
    values: dict[str, float] = {}
    if state.evaluation is not None:
        sets = state.evaluation.sets
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
        console.print(
            "  this model cannot be exported, which its training does not need: "
            f"{format_error(error)}"
        )


def check_traces(state: State) -> None:
    """Traces the forward and backward pass twice.

    Raises:
        SetupError: the graphs are not the same.
    """
    first, second = (list(add_called_ops(_trace(state).get_operations())) for _ in range(2))
    op = find_difference(first, second)
    if op is not None:
        where = state.hooks.find_owner(read_frames(op)) or state.hooks.create_model
        raise SetupError(
            f"{where}: draws random numbers of Python or NumPy when it is traced, once for all "
            "steps; take those of tf.random or keras.random, or draw them with the data."
        )


def _trace(state: State) -> tf.Graph:
    """Traces the forward and backward pass of one replica, on placeholders."""
    with (
        state.strategy.scope(),
        make_scratch_graph("check").as_default() as graph,
        LoneReplica(state.strategy, 0),
    ):
        share = Share(make_placeholders(state.data.share_spec))
        for turn in TraceContext(state.components).list_turns():
            forward_backward(turn, 1, frozenset(), share)
    return graph
