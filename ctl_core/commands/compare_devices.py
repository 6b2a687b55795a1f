"""Compares a step and an evaluation on one device with the same on three.

Nothing has to be known about a mistake to find it: an output, a loss, an update, a variable or a
value of the evaluation is not the same as on one device. The batch does not divide by the number of
devices, so that their shares differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ctl_core.build import create_state, prepare_process
from ctl_core.checkpoint.checkpoints import check_written
from ctl_core.checkpoint.folder import Run, open_session
from ctl_core.cluster.task import Task
from ctl_core.compat import flatten_layers
from ctl_core.graph import StepFunctions
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.model.metrics import read_results
from ctl_core.model.state import State
from ctl_core.numerics.randomness import find_random_ops
from ctl_core.numerics.replicas import ReplicaCopies, has_own_statistics
from ctl_core.numerics.variables import is_summed, name_variable, unwrap
from ctl_core.run.console import LOG, Console
from ctl_core.run.errors import CtlError, RunError, SetupError, format_error
from ctl_core.run.settings import Config

DEVICES = 3
FETCHES = frozenset({"loss", "update_gradients", "output", "variables"})
# Differences up to this share of the largest number are rounding.
TOLERANCE = 1e-3
TOLERANCE_IN_LOWER_PRECISION = 30 * TOLERANCE

_EXCHANGE = "let replicas exchange what it is made of, by ctl_core.all_reduce or all_gather"
_NO_SUM = f"it is no sum over the examples one by one, or is summed twice; {_EXCHANGE}"
_METRIC = (
    "replicas add up its variables; where its state is no sum, give replica 0 the rows of all, by "
    "ctl_core.all_gather, and the others none"
)


class CheckConsole(Console):
    """Prints what was checked, and warnings; the lines of the two steps go to their log only."""

    def say(self, text: str) -> None:
        """Writes a line to the log."""
        LOG.info(text)

    def start(self, step: int, total: int, clock: Any = None) -> None:
        """Shows no progress line."""

    def print(self, text: str) -> None:
        """Prints a line."""
        super().say(text)


class Kind(NamedTuple):
    """A kind of value that is compared.

    Attributes:
        hooks: the hooks that may have computed it. If the first of them is the default, the next
            one is to blame.
        cure: what to do if it differs
    """

    hooks: tuple[str, ...]
    cure: str


# The most probable cause comes first: if an output differs, so do the loss and the update.
KINDS = {
    "variable": Kind(("create_model",), _EXCHANGE),
    "output": Kind(("create_model",), _EXCHANGE),
    "loss": Kind(("grad_pre", "create_loss"), _NO_SUM),
    "update": Kind(("update_pre", "grad_pre", "create_loss"), _EXCHANGE),
    "train metric": Kind(("train_metric_pre",), _METRIC),
    "part of the loss": Kind(("grad_pre",), "give it one number per example"),
    "loss of an evaluation": Kind(("eval_pre", "create_loss"), _NO_SUM),
    "metric": Kind(("metric_pre",), _METRIC),
}


class Key(NamedTuple):
    """The kind and the name of a value, such as ``("update", "dense/kernel")``."""

    kind: str
    name: str


# The arrays that replicas have of each value; a single one where they have it in common.
Values: TypeAlias = dict[Key, list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that is not the same elsewhere as on one device.

    Attributes:
        key: the kind and the name of the value
        expected: the first number that differs, or the shape, on one device
        actual: the same elsewhere
    """

    key: Key
    expected: str
    actual: str


def compare_devices(hooks: Hooks, config: Config, console: CheckConsole) -> None:
    """Compares one device with three, and one batch with its micro-batches.

    Differences between a batch and its micro-batches are only warned of.

    Raises:
        SetupError: something differs; the error is the most probable cause.
        RunError: the comparison itself failed, so it says nothing.
    """
    try:
        try:
            comparison = _Comparison(hooks, config, console, choose_batch_size(config))
        except CtlError as error:
            # Some hooks need shares of one size: count_examples, or code that asks for a length.
            problem = format_error(error, 160)
            console.print(f"  unequal shares cannot be compared, equal ones are: {problem}")
            size = choose_even_batch_size(config)
            comparison = _Comparison(hooks, config, console, size)
    except (CtlError, tf.errors.OpError) as error:
        if isinstance(error, _FoundMistake):
            raise SetupError(str(error)) from error
        raise RunError(
            f"check: one device cannot be compared with {DEVICES}: {format_error(error)}"
        ) from error
    console.print(f"  a step and an evaluation on one and on {DEVICES} devices were compared")
    state = comparison.state
    for difference in find_differences(state, comparison.expected, comparison.in_micro_batches):
        console.warn(describe_difference(state, difference, "in micro-batches"))
    differences = list(find_differences(state, comparison.expected, comparison.actual))
    if not differences:
        return
    descriptions = [describe_difference(state, difference, "three") for difference in differences]
    cause = differences[0]
    if cause.key.kind in ("loss", "update") and comparison.is_extra_loss_to_blame():
        descriptions = [describe_extra_loss(state, cause)]
    if len(descriptions) > 1:
        console.print(f"  {len(descriptions)} values differ, the most probable cause first:")
        for description in descriptions:
            console.print(f"  - {description}")
    raise SetupError(f"check: {descriptions[0]}")


class _FoundMistake(SetupError):
    """A mistake that shows on several devices before anything is compared."""


class _Comparison:
    """Builds a run on different devices, and observes its values.

    Attributes:
        state: the run on one device
        expected: the values on one device
        actual: the values on three devices
        in_micro_batches: the values on one device in micro-batches; those of whole batches if the
            run has none
    """

    state: State

    def __init__(
        self, hooks: Hooks, config: Config, console: CheckConsole, batch_size: int
    ) -> None:
        self._hooks = _repeat_data(hooks)
        self._config = config
        self._console = console
        self._batch_size = batch_size
        self._evaluation_sets: dict[str, Any] = {}
        self.expected = self.observe(devices=1)
        self.actual = self.observe(DEVICES)
        self.in_micro_batches = self.expected
        if config.accumulate_steps > 1:
            self.in_micro_batches = self.observe(1, config.accumulate_steps)

    def observe(
        self, devices: int, micro_batches: int = 1, ignores_extra_loss: bool = False
    ) -> list[Values]:
        """Returns the values of steps and of an evaluation on so many CPU devices."""
        hooks = self._hooks
        if ignores_extra_loss:
            hooks = dataclasses.replace(hooks, grad_pre=_without_extra_loss(hooks.grad_pre))
        return self._observe(hooks, devices, micro_batches)

    def _observe(self, hooks: Hooks, devices: int, micro_batches: int) -> list[Values]:
        config = dataclasses.replace(
            self._config,
            batch_size=self._batch_size,
            accumulate_steps=micro_batches,
            eval_batch_size=DEVICES - 1,
            limit_eval=DEVICES,
            virtual_devices=devices,
        )
        run = Run(config, Task(), reading=True)
        with open_session(run, self._console), prepare_process(config):
            state = create_state(hooks, config, run, self._console, _create_strategy(devices))
            self._share_evaluation_data(state)
            if devices == 1:
                self.state = state
            return observe(state)

    def _share_evaluation_data(self, state: State) -> None:
        """Lets evaluations on any number of devices read the same batches."""
        if state.evaluation is None:
            return
        for name, evaluation_set in state.evaluation.sets.items():
            first = self._evaluation_sets.setdefault(name, evaluation_set)
            evaluation_set.make = first.make
            evaluation_set.spec = first.spec

    def is_extra_loss_to_blame(self) -> bool:
        """Returns whether loss and updates are the same if the extra loss is left out."""
        expected = self.observe(1, ignores_extra_loss=True)
        actual = self.observe(DEVICES, ignores_extra_loss=True)
        kinds = {d.key.kind for d in find_differences(self.state, expected, actual)}
        return not kinds & {"output", "loss", "update"}


def choose_batch_size(config: Config) -> int:
    """Returns a batch size at most the run's that gives unequal shares with a row for each.

    A smaller batch than the number of shares becomes larger by need.
    """
    shares = DEVICES * config.accumulate_steps
    size = max(config.batch_size, shares + 1)
    return size - 1 if size % shares == 0 else size


def choose_even_batch_size(config: Config) -> int:
    """Returns a batch size that gives all shares the same number of rows."""
    shares = DEVICES * config.accumulate_steps
    return max(1, config.batch_size // shares) * shares


def _create_strategy(devices: int) -> tf.distribute.Strategy:
    names = [f"CPU:{index}" for index in range(devices)]
    if devices == 1:
        return tf.distribute.OneDeviceStrategy(names[0])
    on_one_device = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(names, cross_device_ops=on_one_device)


def _repeat_data(hooks: Hooks) -> Hooks:
    """Repeats finite training data, of which a batch of another size may need several passes."""
    create_dataset = hooks.create_dataset

    def create_repeated(**values: Any) -> Any:
        dataset = create_dataset.function(**values)
        is_pipeline = isinstance(dataset, tf.data.Dataset)
        if is_pipeline and dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
            return dataset.repeat()
        return dataset

    return dataclasses.replace(
        hooks, create_dataset=_replace_function(create_dataset, create_repeated)
    )


def _without_extra_loss(hook: Hook) -> Hook:
    """Returns a ``grad_pre`` whose extra loss is 0."""

    def call_without(**values: Any) -> Any:
        returned = hook.trace(**values)
        if isinstance(returned, dict):
            return {name: _drop_extra_loss(objective) for name, objective in returned.items()}
        return _drop_extra_loss(returned)

    return _replace_function(hook, tf.autograph.experimental.do_not_convert(call_without))


def _drop_extra_loss(objective: Any) -> Any:
    loss_per_batch, _, *rest = objective
    return (loss_per_batch, 0.0, *rest)


def _replace_function(hook: Hook, function: Callable[..., Any]) -> Hook:
    """Returns a hook that calls another function, and that messages locate as before."""
    setattr(function, "__wrapped__", hook.function)  # noqa: B010
    return dataclasses.replace(hook, function=function)


def observe(state: State) -> list[Values]:
    """Observes a step without noise, two steps with it, and an evaluation.

    Of steps that draw random numbers, or normalize each replica's batch, only integers are
    compared. Variables and data are as before afterwards.
    """
    observed = [_observe_steps(state, quiet=True, steps=1)]
    observed.append(_observe_steps(state, quiet=False, steps=2))
    if state.evaluation is not None:
        values: Values = {}
        for name, value in state.evaluation.evaluate().items():
            is_loss = name.rpartition("/")[2] == "loss"
            kind = "loss of an evaluation" if is_loss else "metric"
            values[Key(kind, name)] = [np.array(value)]
        for name, array in state.evaluation.arrays.items():
            values[Key("metric", name)] = [array]
        observed.append(values)
    return observed


def _observe_steps(state: State, quiet: bool, steps: int) -> Values:
    functions = StepFunctions(state, tf.summary.create_noop_writer(), quiet)
    _check_written(state, functions)
    copies = ReplicaCopies(state.strategy, list(state.recording.variables.values()))
    with copies.put_back_after():
        for _ in range(steps):
            fetched = functions.take_steps(1, FETCHES)
        is_exact = not _differs_by_nature(state, functions, quiet)
        values = dict(_read_variables(state, is_exact))
        if is_exact:
            values |= _read_step(state, fetched)
    state.data.begin_anew()
    return values


def _check_written(state: State, functions: StepFunctions) -> None:
    """Refuses what training on several devices would refuse when it begins."""
    try:
        check_written(state, functions.trace(FETCHES).graph)
    except SetupError as error:
        raise _FoundMistake(str(error)) from error


def _differs_by_nature(state: State, functions: StepFunctions, quiet: bool) -> bool:
    """Returns whether steps have noise, or batch statistics, that each replica has for itself.

    Stateless draws with an explicit seed are no such noise: they are the same on all replicas.
    """
    if not quiet and any(map(has_own_statistics, state.recording.layers)):
        return True
    graph = functions.trace(FETCHES).graph
    if find_random_ops(graph):
        return True
    captured = {id(outer) for outer, _ in graph.captures}
    local_results = state.strategy.experimental_local_results
    generators = [*state.recording.generators, *state.recording.tf_generators]
    return any(
        id(component.handle) in captured
        for generator in generators
        for component in local_results(generator)
    )


def _read_variables(state: State, is_exact: bool) -> Iterator[tuple[Key, list[np.ndarray]]]:
    """Yields integer variables; if steps are exact, also all that the forward pass writes."""
    written = {id(written.variable) for written in state.components.written if is_exact}
    for name, variable in state.recording.variables.items():
        if variable.dtype.is_integer or id(variable) in written:
            if is_summed(variable):
                components = [variable.read_value()]
            else:
                components = state.strategy.experimental_local_results(variable)
            yield Key("variable", name), [component.numpy() for component in components]


def _read_step(state: State, fetched: dict[str, Any]) -> Values:
    """Returns the values that a step returned, and the training metrics."""
    values: Values = {}
    for index, output in enumerate(tf.nest.flatten(fetched["output"])):
        if isinstance(output, tf.Tensor) and output.dtype != tf.string:
            values[Key("output", str(index))] = [output.numpy()]
    for name, loss in _by_objective(fetched["loss"]).items():
        values[Key("loss", name)] = [loss.numpy()]
    variables = _by_objective(fetched["variables"])
    for objective, gradients in _by_objective(fetched["update_gradients"]).items():
        for variable, gradient in zip(variables[objective], gradients, strict=True):
            if gradient is not None:
                array = tf.convert_to_tensor(gradient).numpy()
                values[Key("update", name_variable(variable))] = [array]
    for name, value in read_results(state.components.list_logged_metrics()).scalars.items():
        is_part = name in state.components.loss_metrics
        kind = "part of the loss" if is_part else "train metric"
        values[Key(kind, name)] = [np.array(value)]
    return values


def _by_objective(values: Any) -> dict[str, Any]:
    return values if isinstance(values, dict) else {"": values}


def find_differences(
    state: State, expected: list[Values], actual: list[Values]
) -> Iterator[Difference]:
    """Yields the values that differ by more than rounding, each once.

    The most probable cause comes first: later observations depend on the updates of earlier ones.
    """
    tolerance = TOLERANCE_IN_LOWER_PRECISION if state.computed_in else TOLERANCE
    seen: set[Key] = set()
    order = list(KINDS)
    for values, others in zip(expected, actual, strict=True):
        updates = [arrays[0] for key, arrays in values.items() if key.kind == "update"]
        steepest = max((float(np.abs(update).max(initial=0)) for update in updates), default=0.0)
        for key in sorted(values, key=lambda key: order.index(key.kind)):
            if key in seen:
                continue
            array = values[key][0]
            scale = steepest if key.kind == "update" else 1.0
            for other in others.get(key, []):
                pair = find_different_pair(array, other, tolerance, scale)
                if pair is not None:
                    seen.add(key)
                    yield Difference(key, *pair)
                    break


def find_different_pair(
    array: np.ndarray, other: np.ndarray, tolerance: float, scale: float
) -> tuple[str, str] | None:
    """Returns the first pair of numbers that differ, or the shapes; None if it is only rounding.

    Args:
        array: on one device
        other: elsewhere
        tolerance: how much of the largest number, or of ``scale``, is rounding
        scale: see ``tolerance``
    """
    if array.shape != other.shape:
        # A value that has no row for each example is there once for each device.
        if array.ndim and other.shape == (DEVICES * array.shape[0], *array.shape[1:]):
            array = np.concatenate([array] * DEVICES)
        else:
            return str(array.shape), str(other.shape)
    rounding = 0.0
    is_integer = np.issubdtype(array.dtype, np.integer) or array.dtype == bool
    if not is_integer:
        kind = complex if np.iscomplexobj(array) else float
        array = array.astype(kind)
        other = other.astype(kind)
        largest = float(np.nan_to_num(np.abs(array)).max(initial=0))
        rounding = tolerance * max(largest, scale)
    equal = np.isclose(array, other, rtol=0, atol=rounding, equal_nan=True)
    if equal.all():
        return None
    first = tuple(np.argwhere(~equal)[0])
    return f"{array[first]:.6g}", f"{other[first]:.6g}"


def describe_difference(state: State, difference: Difference, where: str) -> str:
    """Describes a difference: the hook, the value, and what to do."""
    kind = KINDS[difference.key.kind]
    hook = _find_blamed(state, kind)
    label = " ".join(filter(None, (difference.key.kind, difference.key.name)))
    layer = find_layer(state, difference.key.name)
    return (
        f"{hook}: the {label}{layer} differs: {kind.cure} "
        f"[one device {difference.expected}, {where} {difference.actual}]"
    )


def describe_extra_loss(state: State, difference: Difference) -> str:
    """Describes a loss that differs because of its extra part, such as a layer's add_loss."""
    layers = sorted({layer.name for layer in state.recording.layers if _adds_losses(layer)})
    named = f"add_loss of the layer {', '.join(layers)}" if layers else "the extra loss of grad_pre"
    hook = state.hooks.grad_pre
    if hook.is_default or layers:
        hook = state.hooks.create_model
    return (
        f"{hook}: the {difference.key.kind} differs by {named}, which depends on how many rows a "
        "replica has; make it a mean over the rows (tf.reduce_mean), or add it to loss_per_batch "
        f"in grad_pre [one device {difference.expected}, three {difference.actual}]"
    )


def _adds_losses(layer: keras.Layer) -> bool:
    """Returns whether a layer itself, not one inside it, has losses besides its regularizers."""
    if len(flatten_layers(layer)) > 1:
        return False
    regularized = [v for v in layer.trainable_weights if getattr(v, "regularizer", None)]
    return len(layer.losses) > len(regularized)


def _find_blamed(state: State, kind: Kind) -> Hook:
    """Returns the first hook of a kind that is the user's, or the last one."""
    hooks: list[Hook] = [getattr(state.hooks, name) for name in kind.hooks]
    for hook in hooks:
        if not hook.is_default:
            return hook
    return hooks[-1]


def find_layer(state: State, name: str) -> str:
    """Returns `` of the layer 'x' (Kind)`` for the innermost layer of a variable, or nothing."""
    variable = state.recording.variables.get(name)
    holders = [
        layer
        for layer in state.recording.layers
        if any(unwrap(held) is variable for held in layer.variables)
    ]
    layer = min(holders, key=lambda holder: len(holder.variables), default=None)
    return f" of the layer '{layer.name}' ({type(layer).__name__})" if layer else ""
