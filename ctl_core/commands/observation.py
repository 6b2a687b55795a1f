"""Observes the values of training steps and of an evaluation, for ``train --check``.

The values are observed on one device and on several, and compared in differences.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ctl_core.commands.compare_graphs import describe_with_attributes, find_difference
from ctl_core.compat import FunctionGraph, add_called_ops, flatten_layers, read_added_losses
from ctl_core.compilation import choose_functions
from ctl_core.graph import StepFunctions, begin_reading
from ctl_core.hooks.hooks import Hook
from ctl_core.model.averages import has_own_statistics
from ctl_core.model.components import SINGLE_OBJECTIVE
from ctl_core.model.copies import ReplicaCopies
from ctl_core.model.metrics import read_results
from ctl_core.model.state import State
from ctl_core.numerics.randomness import is_noise_of_replica
from ctl_core.numerics.variables import cast_to_float32, is_summed, name_variable, walk
from ctl_core.run.errors import CtlError
from ctl_core.types import Model, ModelOutput

FETCHES = frozenset({"loss", "weight", "gradients", "update_gradients", "output", "variables"})


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of value that is compared.

    Attributes:
        noun: the noun for such a value in messages
        hooks: the hooks that may be the cause of a difference; messages name the first hook that
            the user wrote, or the last hook if the user wrote none
        cure: how to fix a difference
        follows: the nouns of the kinds from which such a value is computed
    """

    noun: str
    hooks: tuple[str, ...]
    cure: str
    follows: tuple[str, ...] = ()


_EXCHANGE = (
    "let replicas exchange the values that it is computed from, with ctl_core.all_reduce or "
    "all_gather"
)
_NO_SUM = f"it is not a sum over examples, or it is summed twice; {_EXCHANGE}"
_METRIC = (
    "the engine adds up its variables over the replicas; if its state is not a sum, pass the "
    "rows of all replicas to replica 0 with ctl_core.all_gather, and none to the others"
)
VARIABLE = Kind("variable", ("create_model",), _EXCHANGE)
OUTPUT = Kind("output", ("create_model",), _EXCHANGE, ("variable",))
WEIGHT = Kind("weight of the batch", ("batch_weight",), _NO_SUM, ("variable", "output"))
EXTRA_LOSS = Kind(
    "extra loss",
    ("grad_pre", "create_model"),
    "replicas are weighted by their numbers of rows, so it must not grow with them: return a "
    f"mean over the rows, or {_EXCHANGE}",
    ("variable", "output"),
)
LOSS = Kind(
    "loss", ("grad_pre", "create_loss"), _NO_SUM, ("variable", "output", "weight of the batch")
)
LOGGED = Kind(
    "part of the loss", ("grad_pre",), "pass it one number per example", ("variable", "output")
)
GRADIENT = Kind(
    "gradient",
    ("grad_pre", "create_loss"),
    _EXCHANGE,
    ("variable", "output", "weight of the batch", "extra loss", "loss"),
)
UPDATE = Kind("update", ("update_pre",), _EXCHANGE, (*GRADIENT.follows, "gradient"))
TRAIN_METRIC = Kind("train metric", ("train_metric_pre",), _METRIC, ("variable", "output", "loss"))
EVAL_LOSS = Kind(
    "loss of an evaluation", ("eval_pre", "create_loss"), _NO_SUM, ("output", "extra loss", "loss")
)
METRIC = Kind("metric", ("metric_pre",), _METRIC, ("output",))
# The kinds, in the order in which a step computes them. If a value differs, values of later kinds
# may differ as a result.
ORDER = (
    VARIABLE, OUTPUT, WEIGHT, EXTRA_LOSS, LOSS, LOGGED, GRADIENT, UPDATE, TRAIN_METRIC, EVAL_LOSS,
    METRIC,
)  # fmt: skip

Array: TypeAlias = np.ndarray | tf.RaggedTensor
# The kind of a value, and its name.
ValueKey: TypeAlias = tuple[Kind, str]
# The values after one step, or of one evaluation. A value is a list of arrays: one array for each
# replica if the replicas may have different values, otherwise a single array.
Values: TypeAlias = dict[ValueKey, list[Array]]


class Observations(NamedTuple):
    """The values of a run on a certain number of devices.

    Attributes:
        training: the values after each step: one step without noise, then two steps with noise; two
            steps without noise if the run has no noise; two steps with noise if it has no others
        evaluation: the results of an evaluation
    """

    training: list[Values]
    evaluation: Values


class NoisySteps(enum.Enum):
    """How steps with noise are compared; the measurement on one device determines this."""

    UNKNOWN = enum.auto()
    COMPARED = enum.auto()
    SAME_GRAPH = enum.auto()  # noise makes no difference, because nothing depends on ``training``
    NOT_COMPARED = enum.auto()  # each replica has its own noise, so no values can be compared
    ONLY = enum.auto()  # the hooks cannot process a training batch with ``training=False``


@dataclasses.dataclass(frozen=True)
class ExtraLossHook(Hook):
    """The hook ``grad_pre``, with the extra loss among the logged parts of the loss.

    Logging the extra loss makes it possible to compare it separately from the loss. If only the
    extra loss differs, the cause is not ``create_loss``.

    Attributes:
        adding_layers: descriptions of the layers that have called ``add_loss``
    """

    adding_layers: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def wrap(cls, hook: Hook) -> ExtraLossHook:
        """Returns a copy of the hook ``grad_pre`` of the run that logs the extra loss."""
        return cls(**{field.name: getattr(hook, field.name) for field in dataclasses.fields(Hook)})

    def trace(self, **values: Any) -> Any:
        """Returns the hook's result, with each objective's extra loss among the logged parts."""
        returned = super().trace(**values)
        for layer in find_layers(values["train_model"]):
            if read_added_losses(layer):
                self.adding_layers.add(f"'{layer.name}' ({type(layer).__name__})")
        if isinstance(returned, dict):
            return {name: log_extra_loss(name, objective) for name, objective in returned.items()}
        return log_extra_loss(values["objective"] or SINGLE_OBJECTIVE, returned)


def log_extra_loss(objective: str, returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the result of ``grad_pre`` for an objective, with the extra loss as a logged part."""
    loss_per_batch, extra_loss, variables, *logged = returned
    value = cast_to_float32(tf.convert_to_tensor(extra_loss))
    parts = {**dict(*logged), name_extra_loss(objective): tf.cast(value, tf.float32)}
    return loss_per_batch, extra_loss, variables, parts


def name_extra_loss(objective: str) -> str:
    """Returns the name under which the extra loss of an objective is logged."""
    return f"extra loss of objective {objective!r}"


def find_layers(model: Model) -> Iterator[keras.Layer]:
    """Yields the Keras layers in a model, which may be any callable that contains layers."""
    for item in walk(model):
        yield from flatten_layers(item)


class Observer:
    """Observes the values of steps and of an evaluation, and restores variables after the steps.

    The position in the data is not restored, because traced graphs have captured the iterator.

    Attributes:
        noisy_steps: how steps with noise are compared
        graph: the graph of the last step that was taken
    """

    def __init__(self, state: State, noisy_steps: NoisySteps) -> None:
        """Prepares to observe a run that has not begun.

        Args:
            state: the state of the run
            noisy_steps: how steps with noise are compared; ``UNKNOWN`` in the first measurement
        """
        self.noisy_steps = noisy_steps
        self.graph: FunctionGraph | None = None
        self._state = state
        self._copies = ReplicaCopies(state.strategy, list(state.recording.variables.values()))

    def observe(self) -> Observations:
        """Takes steps and evaluates, and returns the observed values.

        If each replica draws its own random numbers in a step, or normalizes its own share of the
        batch, only integer variables are observed.
        """
        writer = tf.summary.create_noop_writer()
        noisy = choose_functions(self._state, writer, begun=None)
        compilation = self._state.compilation.parts
        begin_reading(self._state.data, compilation)
        quiet = StepFunctions(self._state, writer, compilation, quiet=True)
        if self.noisy_steps is NoisySteps.UNKNOWN:
            self.noisy_steps = choose_noisy_steps(quiet, noisy)
        if self.noisy_steps is NoisySteps.ONLY:
            training = self._take_steps(noisy, 2, is_quiet=False)
            return Observations(training, read_evaluation(self._state))
        quiet_steps = 1
        if self.noisy_steps is NoisySteps.SAME_GRAPH:
            quiet_steps = 2
        training = self._take_steps(quiet, quiet_steps, is_quiet=True)
        if self.noisy_steps is NoisySteps.COMPARED:
            noisy_values = self._take_steps(noisy, 2, is_quiet=False)
            if not any(noisy_values):
                self.noisy_steps = NoisySteps.NOT_COMPARED
            training += noisy_values
        return Observations(training, read_evaluation(self._state))

    def _take_steps(self, functions: StepFunctions, steps: int, is_quiet: bool) -> list[Values]:
        observed = []
        exact: bool | None = None
        with self._copies.put_back_after():
            for _ in range(steps):
                fetched = functions.take_steps(1, FETCHES)
                if exact is None:
                    exact = is_exact(self._state, functions, is_quiet)
                values = dict(read_variables(self._state, exact))
                if exact:
                    values |= read_step(self._state, fetched)
                observed.append(values)
        self.graph = functions.trace(FETCHES).graph
        return observed


def choose_noisy_steps(quiet: StepFunctions, noisy: StepFunctions) -> NoisySteps:
    """Returns how steps with noise are compared at first.

    If a training batch has another structure than a batch of an evaluation, hooks and models may
    use ``training`` to tell them apart. They then fail in a step without noise.

    Raises:
        CtlError: a step with noise fails, too.
    """
    try:
        quiet.trace(FETCHES)
    except CtlError:
        noisy.trace(FETCHES)
        return NoisySteps.ONLY
    if has_same_graph(quiet, noisy):
        return NoisySteps.SAME_GRAPH
    return NoisySteps.COMPARED


def has_same_graph(quiet: StepFunctions, noisy: StepFunctions) -> bool:
    """Returns whether the steps of two functions have the same ops with the same attributes."""
    quiet_graph = quiet.trace(FETCHES).graph
    noisy_graph = noisy.trace(FETCHES).graph
    difference = find_difference(
        add_called_ops(quiet_graph.get_operations()),
        add_called_ops(noisy_graph.get_operations()),
        describe_with_attributes,
    )
    return difference is None


def is_exact(state: State, functions: StepFunctions, quiet: bool) -> bool:
    """Returns whether a step should compute the same values on any number of devices.

    Args:
        state: the state of the run
        functions: the functions that take the step
        quiet: whether the step has no noise
    """
    if any(is_noise_of_replica(op) for op in functions.list_operations()):
        return False
    generators = set(map(id, state.recording.generators))
    written = state.recording.find_written(functions.trace(FETCHES).graph, state.strategy)
    if any(id(variable) in generators for variable in written):
        return False
    return quiet or not any(map(has_own_statistics, state.recording.layers))


def read_variables(state: State, exact: bool) -> Iterator[tuple[ValueKey, list[Array]]]:
    """Yields the integer variables; if ``exact``, also all variables that the forward pass writes.

    Integer variables of the engine, the data, optimizers and random generators are left out,
    because they are counters.
    """
    compared = set()
    if exact:
        compared = {id(written.variable) for written in state.components.written}
    generators = set(map(id, state.recording.generators))
    for name, variable in state.recording.variables.items():
        is_counter = (
            name.startswith(("engine/", "create_dataset/", "create_opt/"))
            or id(variable) in generators
        )
        is_compared = variable.dtype.is_integer and not is_counter
        if not (is_compared or id(variable) in compared):
            continue
        components: Sequence[tf.Tensor | tf.Variable]
        if is_summed(variable):
            components = [variable.read_value()]
        else:
            components = state.strategy.experimental_local_results(variable)
        yield (VARIABLE, name), [component.numpy() for component in components]


def read_step(state: State, fetched: dict[str, Any]) -> Values:
    """Returns the values of a step: outputs, weight, losses, gradients, updates, train metrics."""
    values: Values = dict(read_outputs(state, fetched["output"]))
    for weight in fetched["weight"]:  # without batch_weight, there is none
        values[WEIGHT, ""] = [weight.numpy()]
    results = read_results(state.components.list_logged_metrics())
    values |= read_losses(state, by_objective(fetched["loss"]), results.scalars)
    for name, array in results.arrays.items():
        values[TRAIN_METRIC, name] = [array]
    variables = by_objective(fetched["variables"])
    for kind, fetch in ((GRADIENT, "gradients"), (UPDATE, "update_gradients")):
        for objective, gradients in by_objective(fetched[fetch]).items():
            for variable, gradient in zip(variables[objective], gradients, strict=True):
                if gradient is not None:
                    array = tf.convert_to_tensor(gradient).numpy()
                    values[kind, name_variable(variable)] = [array]
    return values


def by_objective(value: Any) -> dict[str, Any]:
    """Returns a fetched value by objective; a single objective is called ``SINGLE_OBJECTIVE``."""
    if isinstance(value, dict):
        return value
    return {SINGLE_OBJECTIVE: value}


def read_outputs(state: State, output: ModelOutput) -> Iterator[tuple[ValueKey, list[Array]]]:
    """Yields the parts of the output that have a row for each example.

    Each replica computes its own value of any other part. Such a part matters only if a loss or an
    update uses it, and these are compared as well.
    """
    for index, tensor in enumerate(tf.nest.flatten(output)):
        if not isinstance(tensor, tf.Tensor | tf.RaggedTensor) or tensor.dtype == tf.string:
            continue
        has_rows = tensor.shape.rank != 0 and tensor.shape[0] == state.components.shape.batch
        if has_rows or not state.data.shape.by_rows:
            yield (OUTPUT, str(index)), [_read_array(tensor)]


def _read_array(tensor: tf.Tensor | tf.RaggedTensor) -> Array:
    if isinstance(tensor, tf.RaggedTensor):
        return tensor
    array: np.ndarray = tensor.numpy()
    return array


def read_losses(state: State, losses: dict[str, Any], metrics: dict[str, float]) -> Values:
    """Returns the losses, extra losses, logged parts and train metrics.

    Without ``batch_weight``, the extra loss is subtracted from the loss, so that a difference shows
    in only one of the two. With ``batch_weight``, this is not possible, because the logged mean of
    the extra loss does not use the weights.
    """
    values: Values = {}
    for objective, loss in losses.items():
        extra_loss = metrics.pop(name_extra_loss(objective), 0.0)
        number = loss.numpy()
        if state.hooks.batch_weight is None:
            values[EXTRA_LOSS, objective] = [np.array(extra_loss)]
            number = number - extra_loss
        values[LOSS, objective] = [number]
    for name, value in metrics.items():
        kind = LOGGED if name in state.components.loss_metrics else TRAIN_METRIC
        values[kind, name] = [np.array(value)]
    return values


def read_evaluation(state: State) -> Values:
    """Evaluates, and returns the results."""
    if state.evaluation is None:
        return {}
    values: Values = {}
    for name, value in state.evaluation.evaluate().items():
        kind = EVAL_LOSS if name.rpartition("/")[2] == "loss" else METRIC
        values[kind, name] = [np.array(value)]
    for name, array in state.evaluation.arrays.items():
        values[METRIC, name] = [array]
    return values
