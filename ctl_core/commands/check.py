"""Implements ``train --check``: tries everything once in a temporary folder, and compares devices.

First, a run of two steps is rehearsed, with all host hooks, an evaluation and a checkpoint.
python_values.py finds Python values that host hooks change without any effect. Then the other
commands are tried. compare_processes.py compares the data of one process with those of two if each
process prepares its own rows. Finally, compare_devices.py compares one device with three, and
compare_bits.py compares them bit by bit if there are logical replicas. If a run of this name
exists, it is neither read nor locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import tempfile
import time
from collections.abc import Iterator
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
from ctl_core.commands.compare_processes import compare_processes
from ctl_core.commands.inherited import inherit_settings
from ctl_core.commands.python_values import (
    Change,
    ValueWatch,
    find_frozen_values,
    list_graph_places,
)
from ctl_core.commands.use import print_evaluation, write_model, write_predictions
from ctl_core.compat import add_called_ops, make_scratch_graph
from ctl_core.compilation import explain_for_gpu
from ctl_core.hooks.callbacks_file import refuse_edited_modules
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.hooks.load import load_hooks
from ctl_core.input.batches import Share, make_placeholders
from ctl_core.model.components import TraceContext
from ctl_core.model.forward import forward_backward
from ctl_core.model.linearity import explain_scaled_gradients
from ctl_core.model.ratio import check_losses
from ctl_core.model.state import State
from ctl_core.read_only import restore_run
from ctl_core.run.console import format_values
from ctl_core.run.errors import SetupError, StopTraining, format_error, read_frames
from ctl_core.run.layers import find_layers
from ctl_core.run.listeners import find_listener
from ctl_core.run.settings import Config
from ctl_core.serving import load
from ctl_core.session.messages import count_parameters, describe_weighting
from ctl_core.session.process import prepare_process
from ctl_core.session.run import Run, open_session
from ctl_core.session.turns import PROCESS_TURN
from ctl_core.trainer import Trainer
from ctl_core.types import Callbacks

STEPS = 2


def check(callbacks: Callbacks, config: Config) -> State:
    """Rehearses a run, and compares one device with three.

    The rehearsal takes two steps and calls each host hook once, with the number of a step at which
    it is due. It then evaluates, saves a checkpoint, calls the hook ``at_end``, and runs all
    commands. After that, steps and an evaluation are compared between one CPU device and three;
    with logical replicas, they are also compared bit by bit. Side effects of hooks are real: a
    hook that writes files or calls a service does so during the check, too.

    Args:
        callbacks: a module, a dict or any object with the hooks
        config: the settings of the run to try

    Returns:
        The state of the rehearsed run.

    Raises:
        SetupError: values differ between devices, or a host hook changes a value that a graph does
            not read again.
        RunError: devices cannot be compared.
        CtlError: any error of ``train``.
    """
    with PROCESS_TURN.train(config.run_name or "a run"):
        return _check_alone(callbacks, config)


def _check_alone(callbacks: Callbacks, config: Config) -> State:
    """Checks the hooks while no other thread trains or loads a run."""
    start = time.monotonic()
    refuse_edited_modules(callbacks, config.callbacks)
    console = CheckConsole()
    name = config.run_name or "run"
    if config.listener is not None:  # fails if the listener does not exist; it is never called
        find_listener(config.listener)
    if find_layers(config) is not None:
        config, notes = inherit_settings(config)
        for line in notes:
            console.print(line)
    prepare(dataclasses.replace(config, virtual_devices=max(DEVICES, config.virtual_devices)))
    temporary = tempfile.TemporaryDirectory(prefix="ctl_core-check-", ignore_cleanup_errors=True)
    with temporary as folder:
        console.print("check: everything is in a temporary folder, which is removed at the end.")
        config = dataclasses.replace(config, runs_dir=folder, run_name=name, limit_eval=1)
        # The check trains from scratch.
        config = dataclasses.replace(config, fork=None, init_from=None, init_skip=None)
        hooks, warnings = load_hooks(callbacks, config)  # hooks get the settings of the run itself
        for warning in warnings:
            console.warn(warning)
        config = dataclasses.replace(
            config.remove_periods(), steps=STEPS, ckpt_every=1, profile=None, on_nan="stop"
        )
        state = Rehearsal(hooks, config, console).run()
        _use(hooks, config, console)
        compare_processes(hooks, config, console, state)
        if state.data.has_free_order():
            # Otherwise, the two runs would have different batches, and the model would be blamed.
            config = dataclasses.replace(config, deterministic=True)
        # This comparison has no logical replicas, because with them a value may have the same bits
        # on any number of devices although it is not a sum over the examples.
        plain_config = dataclasses.replace(config, logical_replicas=None)
        compare_devices(hooks, plain_config, console, state.data.shape.by_rows)
        compare_bits(hooks, config, console)
        console.print(f"check: all well, {time.monotonic() - start:.1f} s")
    return state


class Rehearsal:
    """A run of two steps. All host hooks are due after the second step."""

    def __init__(self, hooks: Hooks, config: Config, console: CheckConsole) -> None:
        self._config = config
        self._console = console
        self._changes: list[Change] = []
        self._state: State | None = None
        self._hooks = self._make_all_due(hooks)

    def run(self) -> State:
        """Trains, and checks the Python values that host hooks have changed.

        Raises:
            SetupError: a graph still uses an old value.
        """
        config = self._config
        console = self._console
        run = Run(config, Task())
        with open_session(run, console), prepare_process(config):
            state = create_state(self._hooks, config, run, console)
            self._state = state
            console.print(f"  {self._hooks.create_model}: {count_parameters(state)}")
            weighting = describe_weighting(state)
            if weighting is not None:
                console.print(f"  {weighting}")
            check_losses(state, console)
            line = explain_scaled_gradients(state)
            if line is not None:
                console.print(f"  {line}")
            check_traces(state)
            with contextlib.closing(Trainer(state, run, console, Signals())) as trainer:
                trainer.restore()
                trainer.train()
                console.print(f"  {explain_for_gpu(state)}")
                self._judge_changes(state)
        return state

    def _make_all_due(self, hooks: Hooks) -> Hooks:
        """Returns the hooks of the rehearsal: all host hooks are due after its last step.

        Each hook is passed the number of the step that it is meant for.
        """
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
        """Wraps a host hook, to print that it ran, and to record the Python values that it changes.

        Args:
            hook: the host hook
            step: the number of the step that the hook is meant for, if there is one
        """

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
        except StopTraining as error:  # the other hooks are still tried
            ending = f"; it ends training here. {error}".rstrip()
        self._console.print(f"  {hook} ran{when}{ending}")
        self._changes += watch.list_changes()

    def _judge_changes(self, state: State) -> None:
        """Rejects Python values that host hooks have changed but that a graph does not read again.

        Prints a warning about all other changed values, because no checkpoint contains them.
        """
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
                f"{hook} remembers {', '.join(hook_names)} in Python, which is not in "
                "checkpoints; keep values that training depends on in state."
            )


def _use(hooks: Hooks, config: Config, console: CheckConsole) -> None:
    """Evaluates, predicts, exports and loads a run, as the commands do.

    A model that cannot be exported is accepted, unless the project has a hook for serving.
    """
    values: dict[str, float] = {}
    errors: list[Exception] = []
    with contextlib.redirect_stdout(io.StringIO()):
        # Unlike the commands, which open the run once each.
        with restore_run(hooks, config, checkpoint=None) as (state, run_console):
            if state.evaluation is not None:
                values = print_evaluation(state, run_console)
            with _collect_error(errors):
                for name in state.evaluation.sets if state.evaluation is not None else ():
                    write_predictions(state, run_console, dataset=name)
                write_model(state, run_console)
        if not errors:
            with _collect_error(errors):
                load(Path(config.runs_dir, str(config.run_name)), callbacks=hooks)
    if not errors:
        console.print(f"  evaluate, predict, export, load: {format_values(values) or 'well'}")
        return
    if hooks.serve is not None or hooks.create_inference_model is not None:
        raise errors[0]
    why = format_error(errors[0])
    console.print(f"  this model cannot be exported (training does not need that): {why}")


@contextlib.contextmanager
def _collect_error(errors: list[Exception]) -> Iterator[None]:
    """Ends the block at its first error, and adds the error to a list."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def check_traces(state: State) -> None:
    """Traces the forward and backward pass twice.

    Raises:
        SetupError: the two graphs differ.
    """
    first, second = (list(add_called_ops(_trace(state).get_operations())) for _ in range(2))
    op = find_difference(first, second)
    if op is not None:
        where = state.hooks.find_owner(read_frames(op)) or state.hooks.create_model
        raise SetupError(
            f"{where}: draws random numbers with Python or NumPy while it is traced, so every "
            "step uses the same numbers; use tf.random or keras.random, or draw them in the "
            "input pipeline."
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
