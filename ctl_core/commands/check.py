"""``train --check``: everything once, in a temporary folder, and one device beside three.

To find a mistake, nothing has to be known of it: a variable that is assigned, an output, a loss, an
update or a value of the evaluation is not what it is on one device. The first of these is named.
The run itself, if it is there, is neither read nor locked.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import tempfile
import time
from collections.abc import Iterator
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
from ctl_core.commands.use import evaluate, export, predict
from ctl_core.compat import add_called_ops, make_scratch_graph
from ctl_core.graph import StepFunctions
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.hooks.load import load_hooks
from ctl_core.input.batches import Share, make_placeholders
from ctl_core.model.components import TraceContext
from ctl_core.model.forward import forward_backward
from ctl_core.model.metrics import read_results
from ctl_core.model.ratio import check_losses, has_random_ops
from ctl_core.model.state import State, count_parameters
from ctl_core.numerics.replicas import ReplicaCopies, has_own_statistics
from ctl_core.numerics.variables import is_summed, name_variable, unwrap
from ctl_core.run.console import LOG, Console, format_values
from ctl_core.run.errors import CtlError, SetupError, StopTraining, format_error, read_frames
from ctl_core.run.listeners import find_listener
from ctl_core.run.settings import Config
from ctl_core.serving import load
from ctl_core.trainer import Trainer

STEPS, DEVICES = 2, 3


def check(callbacks: Any, config: Config) -> State:
    """Tries everything that a run would do once, and compares devices; says what a run says.

    Takes two steps, with every host hook, as after its own step; evaluates, saves, runs the hooks
    at the end, and each command. Then it takes steps and evaluates on one CPU device and on three.
    Hooks that write files or call services do so.

    It returns and raises what ``train`` does, and a SetupError where devices differ.
    """
    begun, console, name = time.monotonic(), _Console(), config.run_name or "run"
    if config.listener is not None:  # which hears nothing of a check
        find_listener(config.listener)
    prepare(dataclasses.replace(config, virtual_devices=max(DEVICES, config.virtual_devices)))
    temporary = tempfile.TemporaryDirectory(prefix="ctl_core-check-", ignore_cleanup_errors=True)
    with temporary as folder:
        console.print(f"check of {name}: all of it in a temporary folder, which is removed.")
        config = dataclasses.replace(config, runs_dir=folder, run_name=name, limit_eval=1)
        config = dataclasses.replace(config, fork=None, init_from=None)  # with fresh weights
        hooks, warnings = load_hooks(callbacks, config)  # which see the settings as they are
        for warning in warnings:
            console.warn(warning)
        config = dataclasses.replace(
            config.remove_periods(), steps=STEPS, ckpt_every=1, profile=None, on_nan="stop"
        )
        state = _train(hooks, config, console)
        _use(hooks, state, config, console)
        _compare(hooks, config, console)
        console.print(f"check: all well, {time.monotonic() - begun:.1f} s")
    return state


class _Console(Console):
    """Prints what was checked, and warnings; what a run of two steps says is in its log."""

    def say(self, text: str) -> None:
        """Writes a line to the log."""
        LOG.info(text)

    def start(self, step: int, total: int, clock: Any = None) -> None:
        """Begins no progress line."""

    def print(self, text: str) -> None:
        """Prints a line."""
        super().say(text)


def _train(hooks: Hooks, config: Config, console: _Console) -> State:
    """Trains two steps; all host hooks are due after the last, each with the number of its own."""

    def rehearse(hook: Hook, at: int | None = None) -> Hook:
        @functools.wraps(hook.function)
        def run(**values: Any) -> None:
            if at is not None and "step" in values:
                values["step"] = at
            ended, before = "", read_memory(hook.function)
            try:
                hook.function(**values)
            except StopTraining as asked:  # the others are to run, too
                ended = f"; it ends training there. {asked}".rstrip()
            console.print(f"  {hook} ran{f', as after step {at}' * (at is not None)}{ended}")
            after = read_memory(hook.function)
            if changed := [name for name in after if after[name] != before.get(name)]:
                console.warn(
                    f"{hook} remembers {', '.join(changed)} in Python, which no checkpoint holds; "
                    "keep in state what training depends on."
                )

        return dataclasses.replace(hook, function=run)

    several = [*hooks.every_steps.items(), *hooks.at_step.items()]
    due = [rehearse(hook, step) for step, some in several for hook in some]
    rehearsed = dataclasses.replace(
        hooks,
        every_steps={STEPS: tuple(due)} if due else {},
        at_step={},
        after_eval=tuple(map(rehearse, hooks.after_eval)),
        at_end=tuple(map(rehearse, hooks.at_end)),
    )
    run = Run(config, Task())
    with open_session(run, console), prepare_process(config):
        state = create_state(rehearsed, config, run, console)
        console.print(f"  {hooks.create_model}: {count_parameters(state)}")
        check_losses(state, console)
        check_traces(state)
        trainer = Trainer(state, run, console, Signals())
        trainer.restore()
        trainer.train()
    return state


def read_memory(function: Any) -> dict[str, str]:
    """Returns the numbers and arrays in what a hook of the host reaches in Python, as texts."""
    own = getattr(function, "__self__", function)
    code = function if inspect.isroutine(function) else type(function).__call__
    held = dict(getattr(own, "__dict__", {}))
    with contextlib.suppress(TypeError, ValueError):  # it is not written in Python
        found = inspect.getclosurevars(code)
        held |= {**found.globals, **found.nonlocals}
    for name, one in list(held.items()):
        inner = one if isinstance(one, dict) else {}
        held |= {f"{name}[{key!r}]": value for key, value in inner.items()}
    kinds = (int, float, np.generic, np.ndarray)
    return {name: repr(value) for name, value in held.items() if isinstance(value, kinds)}


def _use(hooks: Hooks, state: State, config: Config, console: _Console) -> None:
    """Evaluates, predicts, exports and loads, as the commands do; some models only train."""
    sets = state.evaluation.sets if state.evaluation else ()
    with contextlib.redirect_stdout(io.StringIO()):
        values = evaluate(hooks, config) if sets else {}
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
        said = "this model cannot be exported, which its training does not need"
        console.print(f"  {said}: {format_error(error)}")


def check_traces(state: State) -> None:
    """Traces the forward pass twice, and refuses what is not the same graph then."""

    def describe(op: Any) -> tuple[str, Any]:
        return op.type, op.get_attr("value") if op.type == "Const" else None

    one, other = (add_called_ops(_trace(state)[0].get_operations()) for _ in range(2))
    for first, second in zip(one, other, strict=False):
        if describe(first) != describe(second):
            where = state.hooks.find_owner(read_frames(first)) or state.hooks.create_model
            raise SetupError(
                f"{where}: draws random numbers of Python or NumPy when it is traced, once for all "
                "steps; take those of tf.random or keras.random, or draw them with the data."
            )


def _trace(state: State) -> tuple[Any, dict[str, list[Any]]]:
    """Traces forward and backward pass; returns the graph, and what is trained by objective."""
    trained: dict[str, list[Any]] = {}
    with (
        state.strategy.scope(),
        make_scratch_graph("check").as_default() as graph,
        LoneReplica(state.strategy, 0),
    ):
        share = Share(make_placeholders(state.data.share_spec))
        for turn in TraceContext(state.components).list_turns():
            trained |= forward_backward(turn, 1, frozenset(), share)[1]
    return graph, trained


FETCHES = frozenset({"loss", "update_gradients", "output"})
TOLERANCE = 1e-3
_EXCHANGE = "let replicas exchange what it is made of, by ctl_core.all_reduce or all_gather"
_NO_SUM = f"it is no sum over the examples one by one, or is summed twice; {_EXCHANGE}"
_METRIC = (
    "replicas add up its variables; where its state is no sum, give replica 0 the rows of all, by "
    "ctl_core.all_gather, and the others none"
)
# Of what differs, by kind: the hooks that may have made it, of which a default is blameless where
# another follows, and what to do.
_BLAMED: dict[str, tuple[tuple[str, ...], str]] = {
    "output": (("create_model",), _EXCHANGE),
    "loss": (("grad_pre", "create_loss"), _NO_SUM),
    "update": (("update_pre", "grad_pre", "create_loss"), _EXCHANGE),
    "variable": (("create_model",), _EXCHANGE),
    "train metric": (("train_metric_pre",), _METRIC),
    "part of the loss": (("grad_pre",), "give it one number per example"),
    "loss of an evaluation": (("eval_pre", "create_loss"), _NO_SUM),
    "metric": (("metric_pre",), _METRIC),
}

# What replicas have, by what it is, "output" say, and its name.
Values = dict[tuple[str, str], list[np.ndarray]]


def _compare(hooks: Hooks, config: Config, console: _Console) -> None:
    """Refuses what differs on one device and on three, of which one has no rows to evaluate.

    Of what differs in micro-batches it only warns.
    """
    sets: dict[str, Any] = {}
    shares = DEVICES * config.accumulate_steps

    def compute(devices: int, micro_batches: int = 1) -> tuple[State, list[Values]]:
        own = dataclasses.replace(
            config, batch_size=max(1, config.batch_size // shares) * shares,
            accumulate_steps=micro_batches, eval_batch_size=DEVICES - 1, limit_eval=DEVICES,
            virtual_devices=devices,
        )  # fmt: skip
        names = [f"CPU:{index}" for index in range(devices)]
        on_one = tf.distribute.ReductionToOneDevice()
        strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=on_one)
        if devices == 1:
            strategy = tf.distribute.OneDeviceStrategy(names[0])
        run = Run(own, Task(), reading=True)
        with open_session(run, console), prepare_process(own):
            state = create_state(hooks, own, run, console, strategy)
            for name, one in state.evaluation.sets.items() if state.evaluation else ():
                first = sets.setdefault(name, one)  # batches of it are the same on more devices
                one.make, one.spec = first.make, first.spec
            return state, observe(state)

    try:
        (state, one), (_, three) = compute(1), compute(DEVICES)
        parts = compute(1, config.accumulate_steps)[1] if config.accumulate_steps > 1 else one
    except (CtlError, tf.errors.OpError) as error:  # batches of a fixed size, say
        console.print(f"  devices cannot be compared: {format_error(error)}")
        return
    console.print(f"  a step and an evaluation on one and on {DEVICES} devices were compared")
    for difference in find_differences(state, one, parts, "in micro-batches"):
        console.warn(difference)
    for difference in find_differences(state, one, three, "three"):
        raise SetupError(f"check: {difference}")


def observe(state: State) -> list[Values]:
    """Returns the values of a step without noise, of two steps with it, and of the evaluation.

    Of steps that draw random numbers, or normalize each replica's batch, only integers count.
    Variables and data are as before.
    """
    found: list[Values] = []
    copies = ReplicaCopies(state.strategy, list(state.recording.variables.values()))
    for quiet, steps in ((True, 1), (False, 2)):
        functions = StepFunctions(state, tf.summary.create_noop_writer(), quiet)
        with copies.put_back_after():
            for _ in range(steps):
                fetched = functions.take_steps(1, FETCHES)
            exact = not has_random_ops(functions.list_operations()) and (
                quiet or not any(map(has_own_statistics, state.recording.layers))
            )
            found.append(dict(_read_variables(state, exact)))
            found[-1] |= dict(_read_step(state, fetched)) if exact else {}
        state.data.begin_anew()
    if state.evaluation is not None:
        found.append({})
        for name, value in state.evaluation.evaluate().items():
            kind = "loss of an evaluation" if name.rpartition("/")[2] == "loss" else "metric"
            found[-1][kind, name] = [np.array(value)]
    return found


def _read_variables(state: State, exact: bool) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yields what replicas have in integers; if exact, in all that the forward pass assigns."""
    assigned = {id(one.variable) for one in state.components.written if exact}
    for name, variable in state.recording.variables.items():
        if variable.dtype.is_integer or id(variable) in assigned:
            local = state.strategy.experimental_local_results(variable)
            several = [variable.read_value()] if is_summed(variable) else local
            yield ("variable", name), [part.numpy() for part in several]


def _read_step(state: State, fetched: dict[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yields what a step returned, and the train metrics."""
    for index, part in enumerate(tf.nest.flatten(fetched["output"])):
        if isinstance(part, tf.Tensor) and part.dtype != tf.string:
            yield ("output", str(index)), [part.numpy()]
    loss, updates, trained = fetched["loss"], fetched["update_gradients"], _trace(state)[1]
    for name, value in (loss if isinstance(loss, dict) else {"": loss}).items():
        yield ("loss", name), [value.numpy()]
    for objective, several in (updates if isinstance(updates, dict) else {"": updates}).items():
        for variable, value in zip(trained[objective], several, strict=True):
            if value is not None:
                yield ("update", name_variable(variable)), [tf.convert_to_tensor(value).numpy()]
    for name, value in read_results(state.components.list_logged_metrics()).items():
        kind = "part of the loss" if name in state.components.loss_metrics else "train metric"
        yield (kind, name), [np.array(value)]


def find_differences(
    state: State, one: list[Values], others: list[Values], where: str
) -> Iterator[str]:
    """Yields what is not the same elsewhere as on one device, and what to do."""
    tolerance = TOLERANCE * (30 if state.computed_in else 1)
    for values, theirs in zip(one, others, strict=True):
        updates = [numbers[0] for (kind, _), numbers in values.items() if kind == "update"]
        steepest = max((float(np.abs(update).max(initial=0)) for update in updates), default=0.0)
        for (kind, name), (number, *_) in values.items():
            least = steepest if kind == "update" else 1.0
            numbers = theirs.get((kind, name), [])
            pairs = [find_pair(number, other, tolerance, least) for other in numbers]
            if found := next(filter(None, pairs), None):
                hooks, cure = _BLAMED[kind]
                several = [getattr(state.hooks, hook) for hook in hooks]
                hook = next((hook for hook in several if not hook.is_default), several[-1])
                both = f"[one device {found[0]}, {where} {found[1]}]"
                yield f"{hook}: the {kind} {name}{find_layer(state, name)} differs: {cure} {both}"


def find_layer(state: State, name: str) -> str:
    """Says of which layer a variable of that name is, the innermost; or nothing."""
    variable = state.recording.variables.get(name)
    holders = [
        layer
        for layer in state.recording.layers
        if any(unwrap(one) is variable for one in layer.variables)
    ]
    layer = min(holders, key=lambda one: len(one.variables), default=None)
    return f" of the layer '{layer.name}' ({type(layer).__name__})" if layer else ""


def find_pair(one: Any, other: Any, tolerance: float, least: float) -> tuple[Any, Any] | None:
    """Returns the first numbers that differ, or the shapes; None where it is rounding.

    Rounding is up to ``tolerance`` of the largest number in ``one``, or of ``least``.
    """
    if one.shape != other.shape:
        return one.shape, other.shape
    rounding = 0.0
    if not np.issubdtype(one.dtype, np.integer):
        one, other = one.astype(float), other.astype(float)
        rounding = tolerance * max(float(np.nan_to_num(np.abs(one)).max(initial=0)), least)
    equal = np.isclose(one, other, rtol=0, atol=rounding, equal_nan=True)
    if equal.all():
        return None
    first = tuple(np.argwhere(~equal)[0])
    return f"{one[first]:.6g}", f"{other[first]:.6g}"
