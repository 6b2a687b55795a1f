"""Compares one CPU device with three, for ``train --check``.

A mistake is found without knowing its kind: a value of a training step or of an evaluation is not
the same on one device and on three. The shares of the three devices differ in size, as those of any
batch may that does not divide by the number of devices.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from ctl_core.build import create_state, prepare_process
from ctl_core.checkpoint.checkpoints import reject_unsaved
from ctl_core.cluster.task import Task
from ctl_core.commands.check_console import CheckConsole
from ctl_core.compat import add_called_ops, flatten_layers, read_added_losses
from ctl_core.evaluation.evaluate import EvaluationSet
from ctl_core.graph import StepFunctions
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.model.averages import has_own_statistics
from ctl_core.model.components import SINGLE_OBJECTIVE
from ctl_core.model.copies import ReplicaCopies
from ctl_core.model.metrics import read_results
from ctl_core.model.state import State
from ctl_core.numerics.randomness import is_noise_of_replica
from ctl_core.numerics.variables import cast_to_float32, is_summed, name_variable, unwrap, walk
from ctl_core.run.errors import CtlError, RunError, SetupError, format_error
from ctl_core.run.settings import Config
from ctl_core.session.run import Run, open_session

DEVICES = 3
TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 3e-2
FETCHES = frozenset({"loss", "gradients", "update_gradients", "output", "variables"})


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of value that is compared.

    Attributes:
        noun: what messages call it
        hooks: the hooks that may be the cause; the first one that the user wrote is named,
            otherwise the last one
        cure: what to do
        follows: the nouns of the kinds that such a value is computed from
    """

    noun: str
    hooks: tuple[str, ...]
    cure: str
    follows: tuple[str, ...] = ()


_EXCHANGE = (
    "let replicas exchange the values it is computed from, by ctl_core.all_reduce or all_gather"
)
_NO_SUM = f"it is no sum over the examples one by one, or is summed twice; {_EXCHANGE}"
_METRIC = (
    "replicas add up its variables; if its state is no sum, give replica 0 the rows of all "
    "replicas, by ctl_core.all_gather, and the others none"
)
VARIABLE = Kind("variable", ("create_model",), _EXCHANGE)
OUTPUT = Kind("output", ("create_model",), _EXCHANGE, ("variable",))
EXTRA_LOSS = Kind(
    "extra loss",
    ("grad_pre", "create_model"),
    "each replica counts by its rows, so it must not grow with them: return a mean over the rows, "
    f"or {_EXCHANGE}",
    ("variable", "output"),
)
LOSS = Kind("loss", ("grad_pre", "create_loss"), _NO_SUM, ("variable", "output"))
LOGGED = Kind(
    "part of the loss", ("grad_pre",), "give it one number per example", ("variable", "output")
)
GRADIENT = Kind(
    "gradient",
    ("grad_pre", "create_loss"),
    _EXCHANGE,
    ("variable", "output", "extra loss", "loss"),
)
UPDATE = Kind("update", ("update_pre",), _EXCHANGE, (*GRADIENT.follows, "gradient"))
TRAIN_METRIC = Kind("train metric", ("train_metric_pre",), _METRIC, ("variable", "output", "loss"))
EVAL_LOSS = Kind(
    "loss of an evaluation", ("eval_pre", "create_loss"), _NO_SUM, ("output", "extra loss", "loss")
)
METRIC = Kind("metric", ("metric_pre",), _METRIC, ("output",))
# In the order in which a step computes them: a value that differs makes later ones differ.
ORDER = (
    VARIABLE, OUTPUT, EXTRA_LOSS, LOSS, LOGGED, GRADIENT, UPDATE, TRAIN_METRIC, EVAL_LOSS, METRIC,
)  # fmt: skip

# The values of one moment by kind and name. A value has a component for each replica that may have
# its own, and one component otherwise.
Values: TypeAlias = dict[tuple[Kind, str], list[Any]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that is not the same on one device and elsewhere.

    Attributes:
        kind: of the value
        name: of the value; empty if it is the only one of its kind
        on_one: the first number that differs, or the shape, as one device has it
        elsewhere: the same elsewhere
    """

    kind: Kind
    name: str
    on_one: str
    elsewhere: str


class Observations(NamedTuple):
    """The values of a run on some number of devices.

    Attributes:
        training: after a step without noise, then after each of two steps with it; after two
            steps if steps with noise are the same
        evaluation: the results of an evaluation
    """

    training: list[Values]
    evaluation: Values


class NoisySteps(enum.Enum):
    """How steps with noise are compared; the measurement on one device finds out."""

    UNKNOWN = enum.auto()
    COMPARED = enum.auto()
    SAME_GRAPH = enum.auto()  # nothing depends on ``training``: steps without noise are the same
    NOT_COMPARED = enum.auto()  # noise leaves nothing to compare


class Measurement(NamedTuple):
    """A run on some number of devices, and its values.

    Attributes:
        state: of the run
        graph: of a training step, with noise if there is any
        observations: the values
        adding_layers: the layers that call ``add_loss``
    """

    state: State
    graph: tf.Graph
    observations: Observations
    adding_layers: list[str]


def compare_devices(hooks: Hooks, config: Config, console: CheckConsole, by_rows: bool) -> None:
    """Compares a step and an evaluation on one device and on three.

    One of the three has no rows to evaluate. With ``accumulate_steps`` one device is compared with
    itself taking micro-batches, too, which gives warnings only.

    Args:
        hooks: of the run
        config: of the run
        console: prints what was compared, and the differences
        by_rows: whether replicas take rows of a batch, and not elements of the dataset

    Raises:
        SetupError: a value differs; all differences were printed, the most probable cause first.
        RunError: something could not be compared; the message says what and why.
    """
    sizes = [choose_uneven_size(config), choose_even_size(config)]
    has_fixed_model = "per_replica_batch_size" in hooks.create_model.arguments
    if has_fixed_model or not by_rows:
        del sizes[0]
    problems: list[str] = []
    for batch_size in sizes:
        comparison = Comparison(hooks, config, batch_size, console)
        try:
            comparison.measure()
        except (CtlError, tf.errors.OpError) as error:
            problems.append(str(error) if isinstance(error, CtlError) else format_error(error))
            continue
        if not problems:
            comparison.report()
            return
        uneven = describe_problem(sizes[0], problems[0])
        console.warn(uneven)
        comparison.report()
        raise RunError(f"check: {uneven}")
    raise RunError(f"check: one device cannot be compared with {DEVICES}: {problems[-1]}")


def describe_problem(batch_size: int, problem: str) -> str:
    """Returns the line that devices cannot be compared for a batch that they share unequally."""
    return (
        f"one device cannot be compared with {DEVICES} for a batch of {batch_size}, which "
        f"{DEVICES} cannot share equally: {problem}"
    )


def choose_even_size(config: Config) -> int:
    """Returns a batch size that divides by the numbers of devices and of micro-batches."""
    shares = DEVICES * config.accumulate_steps
    return max(1, config.batch_size // shares) * shares


def choose_uneven_size(config: Config) -> int:
    """Returns a batch size that divides by neither number, with a row for each share.

    It is the largest one up to the batch size of the run; if there is none, the next larger one.
    """
    divisors = {DEVICES, config.accumulate_steps} - {1}
    smallest = max(divisors) + 1
    lower = range(config.batch_size, smallest - 1, -1)
    candidates = itertools.chain(lower, itertools.count(smallest))
    return next(size for size in candidates if all(size % divisor for divisor in divisors))


class Comparison:
    """The comparison of devices for one batch size."""

    def __init__(
        self, hooks: Hooks, config: Config, batch_size: int, console: CheckConsole
    ) -> None:
        self._hooks = repeat_data(hooks, config.batch_size, batch_size)
        self._config = dataclasses.replace(
            config, batch_size=batch_size, eval_batch_size=DEVICES - 1, limit_eval=DEVICES
        )
        self._console = console
        self._evaluation_sets: dict[str, EvaluationSet] = {}
        self._noisy_steps = NoisySteps.UNKNOWN

    def measure(self) -> None:
        """Takes the measurements, on one device and on three."""
        micro_batches = self._config.accumulate_steps
        self._on_one = self._measure_on(1)
        self._on_three = self._measure_on(DEVICES)
        self._in_micro_batches = None
        if micro_batches > 1:
            self._in_micro_batches = self._measure_on(1, micro_batches)

    def report(self) -> None:
        """Prints what was compared, and all differences.

        Raises:
            SetupError: there are differences on three devices, or variables in the wrong place.
        """
        one, three = self._on_one, self._on_three
        refuse_shared_variables(one)
        self._console.print(
            f"  a step and an evaluation on one and on {DEVICES} devices were compared, with "
            f"batches of {self._config.batch_size}"
        )
        if self._in_micro_batches is not None:
            differences = find_differences(one, self._in_micro_batches)
            for line in describe_differences(one, differences, "in micro-batches"):
                self._console.warn(line)
        lines = describe_differences(one, find_differences(one, three), "three")
        if not lines:
            return
        if len(lines) > 1:
            self._console.print("  differences, the most probable cause first:")
            for line in lines:
                self._console.print(f"  - {line}")
        raise SetupError(f"check: {lines[0]}")

    def _measure_on(self, devices: int, micro_batches: int = 1) -> Measurement:
        config = dataclasses.replace(
            self._config, accumulate_steps=micro_batches, virtual_devices=devices
        )
        names = [f"CPU:{index}" for index in range(devices)]
        if devices == 1:
            strategy = tf.distribute.OneDeviceStrategy(names[0])
        else:
            on_one = tf.distribute.ReductionToOneDevice()
            strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=on_one)
        run = Run(config, Task(), reading=True)
        grad_pre = ExtraLossHook.wrap(self._hooks.grad_pre)
        hooks = dataclasses.replace(self._hooks, grad_pre=grad_pre)
        with open_session(run, self._console), prepare_process(config):
            state = create_state(hooks, config, run, self._console, strategy)
            self._share_evaluation_data(state)
            observer = Observer(state, self._noisy_steps)
            observations = observer.observe()
            self._noisy_steps = observer.noisy_steps
            graph = observer.graph
            return Measurement(state, graph, observations, sorted(grad_pre.adding_layers))

    def _share_evaluation_data(self, state: State) -> None:
        """Lets all measurements evaluate the same batches."""
        if state.evaluation is None:
            return
        for name, evaluation_set in state.evaluation.sets.items():
            first = self._evaluation_sets.setdefault(name, evaluation_set)
            evaluation_set.make, evaluation_set.spec = first.make, first.spec


def repeat_data(hooks: Hooks, batch_size: int, compared_size: int) -> Hooks:
    """Returns hooks whose datasets never end, for a comparison with another batch size.

    A dataset of a single batch could otherwise not fill the batches of the comparison. A hook that
    drops the examples after the last whole batch is not asked for larger batches than in the run.
    """
    create_dataset = hooks.create_dataset

    @functools.wraps(create_dataset.function)
    def create_repeated(**values: Any) -> Any:
        for name in {"global_batch_size", "per_replica_batch_size"} & values.keys():
            if values[name] == compared_size:
                values[name] = min(batch_size, compared_size)
        dataset = create_dataset.function(**values)
        is_pipeline = isinstance(dataset, tf.data.Dataset)
        if is_pipeline and dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
            return dataset.repeat()
        return dataset

    return dataclasses.replace(
        hooks, create_dataset=dataclasses.replace(create_dataset, function=create_repeated)
    )


@dataclasses.dataclass(frozen=True)
class ExtraLossHook(Hook):
    """``grad_pre``, with the extra loss among the logged parts of the loss.

    The two are compared separately: a difference of the extra loss is no fault of ``create_loss``.

    Attributes:
        adding_layers: descriptions of the layers that have called ``add_loss``
    """

    adding_layers: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def wrap(cls, hook: Hook) -> ExtraLossHook:
        """Returns the hook of the run, with the extra loss logged."""
        return cls(**{field.name: getattr(hook, field.name) for field in dataclasses.fields(Hook)})

    def trace(self, **values: Any) -> Any:
        """Returns what the hook returned, with the extra loss of each objective as a part more."""
        returned = super().trace(**values)
        for layer in find_layers(values["train_model"]):
            if read_added_losses(layer):
                self.adding_layers.add(f"'{layer.name}' ({type(layer).__name__})")
        if isinstance(returned, dict):
            return {name: log_extra_loss(name, parts) for name, parts in returned.items()}
        return log_extra_loss(values["objective"] or SINGLE_OBJECTIVE, returned)


def log_extra_loss(objective: str, returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adds the extra loss to the logged parts of what ``grad_pre`` returned for an objective."""
    loss_per_batch, extra_loss, variables, *logged = returned
    value = cast_to_float32(tf.convert_to_tensor(extra_loss))
    parts = {**dict(*logged), name_extra_loss(objective): tf.cast(value, tf.float32)}
    return loss_per_batch, extra_loss, variables, parts


def name_extra_loss(objective: str) -> str:
    """Returns the name under which the extra loss of an objective is logged."""
    return f"extra loss of objective {objective!r}"


def find_layers(model: Any) -> Iterator[Any]:
    """Yields the Keras layers of a model, or of what another callable encloses."""
    for item in walk(model):
        yield from flatten_layers(item)


class Observer:
    """Observes the values of steps and of an evaluation; variables are put back.

    The data are read on: graphs that are already traced have captured the iterator.

    Attributes:
        noisy_steps: how steps with noise are compared
        graph: of the last step that was taken
    """

    def __init__(self, state: State, noisy_steps: NoisySteps) -> None:
        """Prepares for a run that has not begun."""
        self.noisy_steps = noisy_steps
        self.graph: tf.Graph | None = None
        self._state = state
        self._copies = ReplicaCopies(state.strategy, list(state.recording.variables.values()))

    def observe(self) -> Observations:
        """Returns the values.

        Only integers are among those of steps in which each replica draws its own random numbers,
        or normalizes its own batch.
        """
        writer = tf.summary.create_noop_writer()
        quiet = StepFunctions(self._state, writer, quiet=True)
        noisy = StepFunctions(self._state, writer)
        if self.noisy_steps is NoisySteps.UNKNOWN:
            self.noisy_steps = NoisySteps.COMPARED
            if has_same_graph(quiet, noisy):
                self.noisy_steps = NoisySteps.SAME_GRAPH
        steps = 2 if self.noisy_steps is NoisySteps.SAME_GRAPH else 1
        training = self._take_steps(quiet, steps, is_quiet=True)
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


def has_same_graph(one: StepFunctions, other: StepFunctions) -> bool:
    """Returns whether two functions take steps by the same ops, with the same attributes."""
    graphs = [functions.trace(FETCHES).graph for functions in (one, other)]
    operations = [add_called_ops(graph.get_operations()) for graph in graphs]
    pairs = itertools.zip_longest(*operations)
    return all(
        first is not None and second is not None and describe_fully(first) == describe_fully(second)
        for first, second in pairs
    )


def describe_fully(op: tf.Operation) -> tuple[str, dict[str, bytes]]:
    """Returns the type of an op and its attributes, without names that each trace makes anew."""
    attributes = {
        name: value.SerializeToString()
        for name, value in op.node_def.attr.items()
        if not (name.startswith("_") or value.HasField("func") or value.list.func)
    }
    return op.type, attributes


def is_exact(state: State, functions: StepFunctions, quiet: bool) -> bool:
    """Returns whether a step should compute the same on any number of devices."""
    if any(is_noise_of_replica(op) for op in functions.list_operations()):
        return False
    generators = set(map(id, state.recording.generators))
    written = state.recording.find_written(functions.trace(FETCHES).graph, state.strategy)
    if any(id(variable) in generators for variable in written):
        return False
    return quiet or not any(map(has_own_statistics, state.recording.layers))


def refuse_shared_variables(measurement: Measurement) -> None:
    """Refuses a step that writes a variable that several replicas would share.

    Raises:
        SetupError: the variable was made outside of the hooks, when the file was imported say.
    """
    state = measurement.state
    written = set(map(id, state.recording.find_written(measurement.graph, state.strategy)))
    for name, variable in state.recording.variables.items():
        if name.startswith("elsewhere") and id(variable) in written:
            raise reject_unsaved(variable.name.split(":")[0])


def read_variables(state: State, exact: bool) -> Iterator[tuple[tuple[Kind, str], Any]]:
    """Yields the integer variables; if exact, all variables that the forward pass writes.

    Left out are counters of the engine, of the data, of optimizers and of random generators.
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
        if is_summed(variable):
            components = [variable.read_value()]
        else:
            components = state.strategy.experimental_local_results(variable)
        yield (VARIABLE, name), [component.numpy() for component in components]


def read_step(state: State, fetched: dict[str, Any]) -> Values:
    """Returns the values of a step: outputs, losses, gradients, updates and train metrics."""
    values: Values = dict(read_outputs(state, fetched["output"]))
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
    """Returns a fetched value by objective; a single one is under ``SINGLE_OBJECTIVE``."""
    return value if isinstance(value, dict) else {SINGLE_OBJECTIVE: value}


def read_outputs(state: State, output: Any) -> Iterator[tuple[tuple[Kind, str], Any]]:
    """Yields the parts of the output that have a row for each example.

    Other parts are one value for each replica: they matter only if a loss or an update uses them.
    """
    for index, part in enumerate(tf.nest.flatten(output)):
        if not isinstance(part, tf.Tensor | tf.RaggedTensor) or part.dtype == tf.string:
            continue
        has_rows = part.shape.rank != 0 and part.shape[0] == state.components.shape.batch
        if has_rows or not state.data.shape.by_rows:
            is_tensor = isinstance(part, tf.Tensor)
            yield (OUTPUT, str(index)), [part.numpy() if is_tensor else part]


def read_losses(state: State, losses: dict[str, Any], metrics: dict[str, float]) -> Values:
    """Returns the losses, extra losses, logged parts and train metrics.

    Without ``batch_weight``, the extra loss is subtracted from the loss, so that a difference is
    found in one of the two. With it, replicas count by weights that the mean does not know.
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


def find_differences(one: Measurement, other: Measurement) -> list[Difference]:
    """Returns what differs from one device, the most probable cause first.

    Only the first moment at which a value differs counts. The last step is left out if something
    differs before it, because everything differs after a wrong update.
    """
    tolerance = LOW_PRECISION_TOLERANCE if one.state.computed_in else TOLERANCE
    training = list(zip(one.observations.training, other.observations.training, strict=False))
    found: dict[tuple[Kind, str], Difference] = {}
    for number, (values, others) in enumerate(training):
        if found and number == len(training) - 1:
            break
        # Where rounding turns a ReLU or a maximum, gradients differ by more than outputs do. The
        # first step is without noise, and with equal weights.
        gradient_tolerance = tolerance if number == 0 else 10 * tolerance
        for difference in compare_values(values, others, tolerance, gradient_tolerance):
            found.setdefault((difference.kind, difference.name), difference)
    evaluation = compare_values(
        one.observations.evaluation, other.observations.evaluation, tolerance, tolerance
    )
    return [*sorted(found.values(), key=lambda one: ORDER.index(one.kind)), *evaluation]


def compare_values(
    one: Values, other: Values, tolerance: float, gradient_tolerance: float
) -> list[Difference]:
    """Returns the values that differ by more than rounding, see ``find_pair``."""
    steepest = {
        kind: max((find_largest(one[key][0]) for key in one if key[0] is kind), default=0.0)
        for kind in (GRADIENT, UPDATE)
    }
    differences = []
    for (kind, name), (number, *_) in one.items():
        is_gradient = kind in steepest
        relative = gradient_tolerance if is_gradient else tolerance
        least = steepest.get(kind, 1.0)
        for component in other.get((kind, name), []):
            pair = find_pair(number, component, relative, least)
            if pair is not None:
                differences.append(Difference(kind, name, *pair))
                break
    return differences


def find_pair(one: Any, other: Any, tolerance: float, least: float) -> tuple[str, str] | None:
    """Returns the first numbers that differ, or the shapes; None if they differ by rounding only.

    Rounding is up to ``tolerance`` of the largest number in ``one``, or of ``least``.
    """
    if tuple(one.shape) != tuple(other.shape) or isinstance(one, tf.RaggedTensor):
        if tuple(one.shape) == tuple(other.shape):  # of ragged tensors, the shapes only
            return None
        return f"shape {tuple(one.shape)}", f"shape {tuple(other.shape)}"
    rounding = 0.0
    if not np.issubdtype(one.dtype, np.integer) and one.dtype != bool:
        kind = complex if np.iscomplexobj(one) else float
        one = one.astype(kind)
        other = other.astype(kind)
        rounding = tolerance * max(find_largest(one), least)
    equal = np.isclose(one, other, rtol=0, atol=rounding, equal_nan=True)
    if equal.all():
        return None
    first = tuple(np.argwhere(~equal)[0])
    return f"{one[first]:.6g}", f"{other[first]:.6g}"


def find_largest(array: np.ndarray) -> float:
    """Returns the largest absolute value of an array, in which NaN counts as 0."""
    return float(np.nan_to_num(np.abs(array)).max(initial=0))


def describe_differences(
    measurement: Measurement, differences: Iterable[Difference], where: str
) -> list[str]:
    """Returns a line for each kind of difference: the hook, the values, and what to do.

    The line of a value that is computed from one before it blames no hook.
    """
    by_kind: dict[Kind, list[Difference]] = {}
    for difference in differences:
        by_kind.setdefault(difference.kind, []).append(difference)
    lines = []
    earlier: set[str] = set()
    for kind, group in by_kind.items():
        hook = find_blamed(measurement, kind)
        names = describe_names(measurement, kind, group)
        verb = "differ" if len(group) > 1 else "differs"
        pair = f"[one device {group[0].on_one}, {where} {group[0].elsewhere}]"
        if not earlier.isdisjoint(kind.follows):
            lines.append(f"{names} {verb}, too, which may follow from the above {pair}")
        else:
            lines.append(f"{hook}: {names} {verb}: {kind.cure} {pair}")
        earlier.add(kind.noun)
    return lines


def find_blamed(measurement: Measurement, kind: Kind) -> Hook:
    """Returns the hook that is the most probable cause."""
    hooks = measurement.state.hooks
    if kind is EXTRA_LOSS and measurement.adding_layers:
        return hooks.create_model
    components = measurement.state.components
    changes_loss = components.optimizers.keys() != components.unchanged_losses
    for name in kind.hooks[:-1]:
        hook: Hook = getattr(hooks, name)
        if hook.is_default or (name == "grad_pre" and not changes_loss):
            continue
        return hook
    return getattr(hooks, kind.hooks[-1])  # type: ignore[no-any-return]


def describe_names(measurement: Measurement, kind: Kind, group: list[Difference]) -> str:
    """Returns the noun and the names of some differences of one kind, such as ``the loss``."""
    state = measurement.state
    names = [f"{each.name}{describe_layer(state, each.name)}" for each in group[:3]]
    nouns = f"{kind.noun}s" if len(group) > 1 else kind.noun
    described = f"the {nouns} {', '.join(names)}".rstrip(" ,")
    if len(group) > len(names):
        described += f" and {len(group) - len(names)} more"
    if kind is EXTRA_LOSS and measurement.adding_layers:
        described += f" (add_loss of the layer {', '.join(measurement.adding_layers)})"
    return described


def describe_layer(state: State, name: str) -> str:
    """Returns the innermost layer that has the variable of a name; empty if there is none."""
    variable = state.recording.variables.get(name)
    if variable is None:
        return ""
    holders = [
        layer
        for layer in state.recording.layers
        if any(unwrap(held) is variable for held in layer.variables)
    ]
    layer = min(holders, key=lambda layer: len(layer.variables), default=None)
    return f" of the layer '{layer.name}' ({type(layer).__name__})" if layer else ""
