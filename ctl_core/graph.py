"""The graph functions that take training steps.

One kind of function takes many steps in a call, and returns the loss of the last one. The other
kind takes one step, and returns the values that due hooks have as arguments. All of them call the
same functions for the work of a device, see model/shared_functions.py. If hooks freeze or unfreeze
layers, the functions are traced again.

In a compiled run on a single replica, each step is one XLA executable. If many batches are read at
once (see input/prefetch.py), their steps are one executable, too. The sum over several replicas
cannot be part of an executable. In this case, each replica has two executables: step.py creates one
for the work before the sum, and update.py creates one for the work after it. compilation.py decides
whether a run is compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from ctl_core.compat import GraphWriter, add_called_ops, is_inaccessible
from ctl_core.hooks.recording import read_flags
from ctl_core.input.batches import BatchShape
from ctl_core.input.prefetch import count_batches
from ctl_core.input.stream import Input
from ctl_core.model.components import Compilation, Components, StepContext, TraceContext
from ctl_core.model.executable import Executable, refuse_to_compile
from ctl_core.model.failures import check_numerics
from ctl_core.model.leaves import list_compared
from ctl_core.model.state import State
from ctl_core.numerics.reduction import PIECES, join_pieces_for_host
from ctl_core.numerics.report import Report
from ctl_core.run.errors import CompilationFailed, HookFailed, RunError
from ctl_core.run.files import relative_path
from ctl_core.step import GlobalBatch, train_step
from ctl_core.types import Batch, BatchSpec, Count, PerReplica, Structure

# A function that TensorFlow has traced, or traces when it is called. TensorFlow does not declare
# the types of its attributes.
GraphFunction: TypeAlias = Any
# Values of a step. The keys are the names of the hook arguments that receive the values.
StepValues: TypeAlias = dict[str, Structure]
# The number of steps that are taken to find out why a graph call failed.
_STEPS_AFTER_FAILURE = 8
# Each graph returns the loss, which costs nothing.
_LOSS = frozenset({"loss"})


def find_compilation(components: Components, data: Input) -> Compilation:
    """Returns the parts of a step that are compiled if the run is compiled.

    The whole step is compiled if there is a single replica and all shapes are fixed; otherwise only
    the work of each replica is compiled.
    """
    if components.shape.logical_replicas is not None:
        return Compilation.REPLICA
    has_fixed_shapes = find_varying_shape(components.shape, data.dataset.element_spec) is None
    if components.shape.replicas == 1 and has_fixed_shapes:
        return Compilation.STEP
    return Compilation.REPLICA


def find_varying_shape(shape: BatchShape, element_spec: BatchSpec) -> str | None:
    """Returns why the tensors of a step do not have fixed shapes; None if they do.

    Args:
        shape: the shape of a global batch
        element_spec: the specification of the elements from which global batches are read
    """
    if not shape.by_rows:
        return "the number of rows in a batch varies"
    if shape.batch % shape.accumulate_steps != 0:
        return "micro-batches differ in size"
    for spec in tf.nest.flatten(element_spec):
        if not isinstance(spec, tf.TensorSpec):
            return "a tensor of the batches is ragged or sparse"
        if spec.dtype == tf.string:
            return "a tensor of the batches contains strings"
        if spec.shape.rank is None or None in spec.shape[1:].as_list():
            return "the width of batches varies"
        if spec.shape.rank == 0:
            return "a tensor of the batches is a scalar"
        if spec.shape[0] is None:
            return "the last batch of a pass may be smaller"
    return None


def begin_reading(data: Input, compilation: Compilation) -> None:
    """Starts reading the training data: many batches at once for compiled steps, if possible."""
    data.begin(_count_batches_at_once(data, compilation))


def _count_batches_at_once(data: Input, compilation: Compilation) -> int:
    """Returns the number of batches to read at once; 0 if they are read one by one."""
    if compilation is Compilation.STEP:
        return count_batches(data.dataset)
    return 0


class CallResult(NamedTuple):
    """The results of a graph call. Values are those of the last step of the call.

    Attributes:
        pieces: the values ``output`` and ``batch`` by name, each as a list with one entry for each
            replica and micro-batch
        values: the other fetched values by name, from the first replica
        unused: the same values from the other replicas. Nothing uses them. If the graph did not
            return them, TensorFlow would rewrite the arithmetic of these replicas, which would then
            round differently, and the variables of the replicas would drift apart.
        reports: bool[steps, flags], a packed ``Report`` for each step
    """

    pieces: dict[str, list[Structure]]
    values: StepValues
    unused: list[tuple[tf.Tensor, ...]]
    reports: tf.Tensor


class GraphKey(NamedTuple):
    """Identifies a traced graph function, or the executable that it calls.

    Attributes:
        trainable: whether each layer, and then each variable, is trainable; see ``read_flags``
        fetches: the names of the values that the function returns
        is_loop: whether the function takes many steps, and returns only the loss
    """

    trainable: tuple[bool, ...]
    fetches: frozenset[str]
    is_loop: bool


class StepFunctions:
    """The graph functions of the inner loop.

    Attributes:
        devices: the replica devices of this process
        reports: the packed reports of each graph call since this list was last emptied
        called: the graph functions that have been called. TensorFlow optimizes or compiles a graph
            during its first call.
        may_compile: whether the current or last graph call may include a compilation
    """

    def __init__(
        self,
        state: State,
        summaries: tf.summary.SummaryWriter,
        compilation: Compilation,
        quiet: bool = False,
    ) -> None:
        """Prepares the functions; they are traced when they are first needed.

        Args:
            state: the state of the run
            summaries: writes the summaries of graph hooks
            compilation: the parts of a step that XLA compiles
            quiet: whether the model runs without noise, so that steps can be compared
        """
        self.devices = tuple(state.strategy.extended.worker_devices)
        self.reports: list[np.ndarray] = []
        self.may_compile = False
        self.called: set[GraphFunction] = set()
        self._state = state
        self._compared = list_compared(state.components)
        self._graphs: dict[GraphKey, GraphFunction] = {}
        self._executables: dict[GraphKey, Executable] = {}
        # The variables that a step trains, if they are fetched: a graph cannot return them.
        self._variables: dict[GraphKey, Structure] = {}
        self._trainable: tuple[bool, ...] = ()
        context = TraceContext(
            state.components,
            quiet=quiet,
            compilation=compilation,
            # Only in a graph without functions, TensorFlow always reports the op that failed.
            shares=not state.config.detect_anomaly,
        )
        if compilation is Compilation.STEP:
            summaries = GraphWriter(refuse_to_compile)
        self._tracer = StepTracer(context, state.data, summaries)
        self._checks_new_graphs = False
        self.refresh()

    def discard(self) -> None:
        """Discards all graphs, which refer to the iterator over the training data."""
        self._graphs.clear()
        self._executables.clear()
        self._tracer.discard()
        self.called.clear()

    def refresh(self) -> None:
        """Reads which layers are frozen now, so that the next step uses a graph traced for them."""
        self._trainable = tuple(read_flags(self._state.recording))

    @property
    def frozen(self) -> int:
        """A hash that identifies which layers are frozen."""
        return hash(self._trainable)

    def list_operations(self) -> Iterator[tf.Operation]:
        """Yields the ops of all traced graphs, and of the functions that these ops call."""
        graphs = [function.graph for function in self._graphs.values()]
        return add_called_ops(itertools.chain(*(graph.get_operations() for graph in graphs)))

    def take_steps(self, steps: int, fetches: frozenset[str] = frozenset()) -> StepValues:
        """Takes steps, and returns values of the last step.

        All steps run in one graph call. If other values than the loss are needed, however, the last
        step is a separate call.

        Args:
            steps: the number of steps to take, at least 1
            fetches: the names of the values to return, from ``table.OBSERVED``

        Returns:
            The values by name, in the form that host hooks receive. With several objectives,
            gradients, variables and losses are dicts by objective. With a single objective,
            gradients and variables are lists, and the loss is a tensor.
        """
        key = self._make_key(fetches, steps)
        function = self.trace(fetches, steps)
        if key.is_loop:
            result = self._call(function, tf.constant(steps))
        else:
            if steps > 1:
                self.take_steps(steps - 1)
            result = self._call(function)
        reports = result.reports.numpy()
        if self._compared:
            self._check_equal(Report.unpack(reports).are_equal)
        self.reports.append(reports)
        values = {name: value for name, value in result.values.items() if name in fetches}
        for name, pieces in result.pieces.items():
            values[name] = join_pieces_for_host(pieces)
        if "variables" in fetches:
            values["variables"] = self._variables[key]
        return values

    def repeat_failure(self) -> None:
        """Takes a few more steps, each device by itself and op by op, until one of them fails.

        If a function fails that all devices call, the other devices cancel the graph call before
        the function can return the reason. Outside of a graph, the function can. Variables may have
        any values after a failure, so it does not matter that they change.

        Raises:
            Exception: the failure. If no step fails, none is raised.
        """
        if self._state.data.is_stream:  # the next batch may never come
            return
        self._tracer.trainable = self._trainable
        self._tracer.summaries = tf.summary.create_noop_writer()
        step = self._state.components.step_variable.read_value()
        for _ in range(_STEPS_AFTER_FAILURE):
            step = step + 1
            self._tracer.step_on_next_batch(_LOSS, None, step)

    def _call(self, function: GraphFunction, *arguments: tf.Tensor) -> CallResult:
        """Calls a graph function, and records whether XLA may compile it during this call."""
        is_compiled = self._tracer.context.compilation is not Compilation.NOTHING
        self.may_compile = is_compiled and function not in self.called
        self.called.add(function)
        result: CallResult = function(*arguments)
        return result

    def _check_equal(self, flags: np.ndarray) -> None:
        """Checks that the leaves of a batch wrote the same values to variables.

        Args:
            flags: bool[steps, n]; says for each step of a call and each variable of
                ``list_compared`` whether the values were the same

        Raises:
            RunError: values differ; the message names the first such step and variable.
        """
        if flags.all():
            return
        row, column = np.argwhere(~flags)[0]
        step = self._state.step - len(flags) + 1 + int(row)
        setting = "accumulate_steps"
        places = "in different micro-batches"
        if self._state.config.logical_replicas is not None:
            setting = "logical_replicas"
            places = "on different logical replicas"
        raise RunError(
            f"{setting}: in step {step}, the forward or backward pass assigns different values to "
            f"{self._compared[column]} {places}; create it with "
            "aggregation=tf.VariableAggregation.MEAN (or SUM) to combine them, assign an equal "
            f"value, or leave out {setting}."
        )

    def trace(self, fetches: frozenset[str] = frozenset(), steps: int = 1) -> GraphFunction:
        """Returns the concrete function for the layers that are frozen now; traces it if necessary.

        The function returns a ``CallResult``. If it is a loop, its argument is the number of steps,
        an int32 scalar.

        Raises:
            CompilationFailed: XLA cannot compile the function, although ``find_obstacle`` found no
                obstacle when the run began.
        """
        key = self._make_key(fetches, steps)
        if key in self._graphs:
            return self._graphs[key]
        self._tracer.trainable = self._trainable
        executable = None
        if self._tracer.context.compilation is Compilation.STEP:
            executable = self._trace_executable(key)
            self._check(executable)
        try:
            self._graphs[key] = self._trace_new(key, executable)
        except HookFailed as error:
            # A hook stored a tensor while a leaf was traced, and used it in the update.
            if not (self._tracer.context.shares and is_inaccessible(error.__cause__)):
                raise
            self._tracer.stop_sharing()
            self._graphs[key] = self._trace_new(key, executable)
        if executable is None:  # otherwise, the step was traced for the executable
            self._variables[key] = self._tracer.pop_variables()
        return self._graphs[key]

    def _trace_new(self, key: GraphKey, executable: Executable | None) -> GraphFunction:
        """Traces the function with this key; ``executable`` is that of a compiled step."""
        if not key.is_loop:
            function = define_single_step(self._tracer, key.fetches, executable)
        elif executable is not None and self._tracer.batches_at_once:
            function = define_stacked_loop(self._tracer, executable)
        else:
            function = define_loop(self._tracer, executable)
        with check_numerics(self._state.config.detect_anomaly):
            return function.get_concrete_function()

    def find_obstacle(self, fetches: frozenset[str]) -> str | None:
        """Returns why XLA cannot compile a step that returns these values; None if it can.

        Nothing is run. From now on, every new graph is checked before it is used.
        """
        self._checks_new_graphs = True
        loop = self._trace_executable(self._make_key(frozenset()))
        if loop.obstacle is not None:
            return loop.obstacle
        return self._trace_executable(self._make_key(fetches)).obstacle

    def _make_key(self, fetches: frozenset[str], steps: int = 1) -> GraphKey:
        """Returns the key of the function for these values and for the layers that are frozen now.

        Every function returns the loss, so most runs need only a loop. For a single step whose loss
        a hook takes, the loop is used if there is one. If hooks take the loss of every step, a call
        of a single step is faster.
        """
        loop = GraphKey(self._trainable, _LOSS, is_loop=True)
        is_loop = not fetches or bool(self._tracer.batches_at_once) or steps > 1
        if fetches <= _LOSS and (is_loop or loop in self._graphs):
            return loop
        return GraphKey(self._trainable, fetches | _LOSS, is_loop=False)

    def _trace_executable(self, key: GraphKey) -> Executable:
        """Returns the executable with this key; traces it if necessary."""
        if key not in self._executables:
            self._tracer.trainable = key.trainable
            if self._tracer.batches_at_once and key.is_loop:
                self._executables[key] = self._tracer.compile_many_steps()
            else:
                self._executables[key] = self._tracer.compile_step(key.fetches)
            self._variables[key] = self._tracer.pop_variables()
        return self._executables[key]

    def _check(self, executable: Executable) -> None:
        """Raises an error if XLA cannot compile an executable that a compiled run needs.

        This concerns only runs that are compiled because ``find_obstacle`` found no obstacle.
        """
        if self._checks_new_graphs and executable.obstacle is not None:
            name = relative_path(self._state.run_dir)
            raise CompilationFailed(
                f"jit_compile: {name} is compiled by XLA, but {executable.obstacle}, which the "
                "next step needs; to continue from it with other random numbers: --fork "
                f"{name} --no-jit-compile."
            )


class TracedStep(NamedTuple):
    """The results of a traced step.

    Attributes:
        report: the packed report of the step
        values: the fetched values by name, as ``strategy.run`` returns them
    """

    report: tf.Tensor
    values: StepValues


class StepTracer:
    """Traces single steps, for a loop or for a call of one step.

    Attributes:
        context: the context in which steps are traced, without a step number
        data: the training data
        batches_at_once: the number of batches that are stacked for an executable; 0 if batches are
            not stacked
        trainable: see ``GraphKey``; graphs with the same flags share their functions
        summaries: writes the summaries of graph hooks
    """

    def __init__(
        self, context: StepContext, data: Input, summaries: tf.summary.SummaryWriter
    ) -> None:
        self.context = context
        self.data = data
        self.batches_at_once = _count_batches_at_once(data, context.compilation)
        self.trainable: tuple[bool, ...] = ()
        self.summaries = summaries
        self._variables: Structure = {}
        self._functions: dict[tuple[bool, ...], dict[Hashable, Any]] = {}

    def discard(self) -> None:
        """Discards the functions that graphs share."""
        self._functions.clear()

    def stop_sharing(self) -> None:
        """Lets each device and each graph trace functions of its own."""
        self.context = dataclasses.replace(self.context, shares=False)
        self.discard()

    def step_on_next_batch(
        self, fetches: frozenset[str], executable: Executable | None, step: tf.Tensor
    ) -> TracedStep:
        """Traces a step that draws the next batch.

        Args:
            fetches: the names of the values to return
            executable: the executable that takes the step; None if the step is not compiled as a
                whole
            step: the number of the step, an int64 scalar
        """
        if executable is None:
            return self.step_on(GlobalBatch(*self.data.draw()), fetches, step)
        traced: TracedStep = executable(next(self.data.iterator), step)
        return traced

    def compile_step(self, fetches: frozenset[str]) -> Executable:
        """Traces the executable for one step; its inputs are a batch and the step number."""

        def take_step(batch: Batch, step: tf.Tensor) -> TracedStep:
            return self.step_on(GlobalBatch(*self.data.deal_out(batch)), fetches, step)

        components = self.context.components
        spec = self.data.dataset.element_spec
        return Executable(components, take_step, spec, tf.TensorSpec([], tf.int64))

    def compile_many_steps(self) -> Executable:
        """Traces the executable for many steps on stacked batches, see ``_take_many_steps``."""
        stacked_spec = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([self.batches_at_once, *spec.shape], spec.dtype),
            self.data.dataset.element_spec,
        )
        index_spec = tf.TensorSpec([], tf.int32)
        return Executable(
            self.context.components,
            partial(_take_many_steps, self),
            stacked_spec, index_spec, tf.TensorSpec([], tf.int64), index_spec,
        )  # fmt: skip

    def step_on(
        self, global_batch: GlobalBatch, fetches: frozenset[str], step: tf.Tensor
    ) -> TracedStep:
        """Traces a step on a global batch; ``step`` is the step number, an int64 scalar."""
        functions = self._functions.setdefault(self.trainable, {})
        context = dataclasses.replace(self.context.begin_step(step), functions=functions)
        with self.summaries.as_default(step):
            result = train_step(context, global_batch, fetches)
        values = result.fetch(fetches)
        if "variables" in values:
            self._variables = values.pop("variables")
        return TracedStep(result.report.pack(), values)

    def pop_variables(self) -> Structure:
        """Returns the variables that the last traced step trains; {} if they are not fetched.

        The traced function returns only tensors, so it cannot return variables. This method has to
        be called after each trace.
        """
        variables = self._variables
        self._variables = {}
        return variables


class LoopState(NamedTuple):
    """The state of a loop of steps inside a graph.

    Attributes:
        done: the number of steps that the loop has taken, an int32 scalar
        reports: the packed report of each step
        losses: the losses of the last step, see ``CarriedLosses``
    """

    done: tf.Tensor
    reports: tf.TensorArray
    losses: list[tf.Tensor]


class CarriedLosses:
    """Carries the losses of each step to the end of a loop.

    A loop requires the types of its variables before its first step is traced. So the losses are
    carried as a list of float64 scalars: those of the first objective on all replicas, then those
    of the next one. The losses of all replicas are carried, because TensorFlow would otherwise
    create another version of the function that computes them; see ``CallResult.unused``.
    """

    def __init__(self, components: Components) -> None:
        self._strategy = components.strategy
        self._replicas = len(components.strategy.extended.worker_devices)
        self._objectives = len(components.optimizers)
        self._loss: Structure = None  # of the step that was traced, without tensors
        self._dtypes: list[tf.DType] = []

    def begin(self) -> list[tf.Tensor]:
        """Returns the losses before the first step."""
        return [tf.zeros([], tf.float64) for _ in range(self._replicas * self._objectives)]

    def carry(self, values: StepValues) -> list[tf.Tensor]:
        """Returns the losses of a step as the loop carries them."""
        losses = [
            loss
            for per_replica in tf.nest.flatten(values["loss"])
            for loss in self._strategy.experimental_local_results(per_replica)
        ]
        self._loss = tf.nest.map_structure(lambda _: 0, values["loss"])
        self._dtypes = [loss.dtype for loss in losses]
        return [tf.cast(loss, tf.float64) for loss in losses]

    def restore(self, carried: list[tf.Tensor]) -> tuple[Structure, tuple[tf.Tensor, ...]]:
        """Returns the loss of the first replica as a step returns it, and those of the others."""
        pairs = zip(carried, self._dtypes, strict=True)
        losses = [tf.cast(loss, dtype) for loss, dtype in pairs]
        firsts = losses[:: self._replicas]
        others = [loss for index, loss in enumerate(losses) if index % self._replicas]
        return tf.nest.pack_sequence_as(self._loss, firsts), tuple(others)


def define_loop(tracer: StepTracer, executable: Executable | None) -> GraphFunction:
    """Defines the graph function that takes steps, and returns the loss of the last one.

    The function has one argument: the number of steps to take, an int32 scalar.

    Args:
        tracer: traces the steps
        executable: the executable that takes a step; None if steps are not compiled as a whole
    """
    components = tracer.context.components

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int32)])
    def run_loop(steps: tf.Tensor) -> CallResult:
        steps_before = components.step_variable.read_value()
        carried = CarriedLosses(components)

        def take_step(done: tf.Tensor, reports: tf.TensorArray, _: list[tf.Tensor]) -> LoopState:
            step = steps_before + tf.cast(done, tf.int64) + 1
            report, values = tracer.step_on_next_batch(_LOSS, executable, step)
            return LoopState(done + 1, reports.write(done, report), carried.carry(values))

        state = _run_loop(components, take_step, steps, steps, carried.begin())
        return _end_loop(components, steps, state, carried)

    return run_loop


def define_single_step(
    tracer: StepTracer, fetches: frozenset[str], executable: Executable | None
) -> GraphFunction:
    """Defines the graph function that takes one step and returns values of this step.

    Args:
        tracer: traces the step
        fetches: the names of the values to return
        executable: the executable that takes the step; None if the step is not compiled as a whole
    """
    components = tracer.context.components
    local_results = components.strategy.experimental_local_results
    replicas = len(components.strategy.extended.worker_devices)

    # The function has no argument for the number of steps, which would make each call about ten
    # microseconds slower.
    @tf.function(autograph=False, input_signature=[])
    def run_step() -> CallResult:
        step = components.step_variable.read_value() + 1
        report, values = tracer.step_on_next_batch(fetches, executable, step)
        pieces = {
            name: list(_list_pieces(values.pop(name), replicas, local_results))
            for name in fetches & {*PIECES}
        }
        computed = [report, *tf.nest.flatten(pieces, expand_composites=True)]
        for value in tf.nest.flatten(values, expand_composites=True):
            computed += local_results(value)
        with tf.control_dependencies(computed):
            components.step_variable.assign_add(1)
        first_values = tf.nest.map_structure(lambda value: local_results(value)[0], values)
        unused = [local_results(value)[1:] for value in tf.nest.flatten(values)]
        return CallResult(pieces, first_values, unused, report[None])

    return run_step


def define_stacked_loop(tracer: StepTracer, executable: Executable) -> GraphFunction:
    """Defines the graph function that takes steps on stacked batches, and returns the last loss.

    The function has one argument: the number of steps to take, an int32 scalar.

    Args:
        tracer: traces the steps
        executable: the executable of ``compile_many_steps``
    """
    components = tracer.context.components

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int32)])
    def run_loop(steps: tf.Tensor) -> CallResult:
        steps_before = components.step_variable.read_value()
        carried = CarriedLosses(components)

        def take_stacked(done: tf.Tensor, reports: tf.TensorArray, _: list[tf.Tensor]) -> LoopState:
            """Takes one step per stacked batch, all in a single call of the executable."""
            stacked, first, count = tracer.data.iterator.take(steps - done)
            earlier_steps = steps_before + tf.cast(done, tf.int64)
            new_reports, loss = executable(stacked, first, earlier_steps, count)
            reports = reports.scatter(done + tf.range(count), new_reports[:count])
            return LoopState(done + count, reports, carried.carry({"loss": loss}))

        state = _run_loop(components, take_stacked, steps, steps, carried.begin())
        return _end_loop(components, steps, state, carried)

    return run_loop


def _end_loop(
    components: Components, steps: tf.Tensor, state: LoopState, carried: CarriedLosses
) -> CallResult:
    """Counts the steps of a loop, and returns the result of the graph call.

    The steps are counted after the loop, so that a call that fails counts none of them.

    Args:
        components: the components of the steps
        steps: the number of steps
        state: the state at the end of the loop
        carried: the object that carried the losses
    """
    reports = state.reports.stack()
    with tf.control_dependencies([reports, *state.losses]):
        components.step_variable.assign_add(tf.cast(steps, tf.int64))
    loss, unused = carried.restore(state.losses)
    return CallResult({}, {"loss": loss}, [unused], reports)


def _run_loop(
    components: Components,
    take_next: Callable[[tf.Tensor, tf.TensorArray, list[tf.Tensor]], LoopState],
    steps: tf.Tensor,
    most_steps: Count,
    no_losses: list[tf.Tensor],
) -> LoopState:
    """Runs a loop of steps inside a graph, and returns the state after the last step.

    Args:
        components: the components of the steps
        take_next: takes one or more steps; its arguments are the fields of a ``LoopState``
        steps: the number of steps to take, an int32 scalar
        most_steps: the number of rows of the reports
        no_losses: the losses before the first step
    """
    flags = len(Report._fields) - 1 + len(list_compared(components))
    reports = tf.TensorArray(tf.bool, most_steps, element_shape=[flags])
    before = LoopState(tf.constant(0), reports, no_losses)
    return LoopState(*tf.while_loop(lambda done, *_: done < steps, take_next, before))


def _take_many_steps(
    tracer: StepTracer, stacked: Batch, first: tf.Tensor, steps_before: tf.Tensor, steps: tf.Tensor
) -> tuple[tf.Tensor, Structure]:
    """Takes steps on stacked batches, inside an XLA executable.

    Args:
        tracer: traces a step
        stacked: the batches
        first: the index of the first batch to use
        steps_before: the number of steps that were taken earlier, an int64 scalar
        steps: the number of steps to take, an int32 scalar

    Returns:
        The reports, with a row for each stacked batch, of which only the first ``steps`` rows are
        meaningful; and the loss of the last step.
    """
    components = tracer.context.components
    carried = CarriedLosses(components)

    def take_step(done: tf.Tensor, reports: tf.TensorArray, _: list[tf.Tensor]) -> LoopState:
        # This uses gather, because XLA would compile the index of a slice into the executable as a
        # constant.
        batch = tf.nest.map_structure(lambda tensor: tf.gather(tensor, first + done), stacked)
        global_batch = GlobalBatch(*tracer.data.deal_out(batch))
        step = steps_before + tf.cast(done, tf.int64) + 1
        report, values = tracer.step_on(global_batch, _LOSS, step)
        return LoopState(done + 1, reports.write(done, report), carried.carry(values))

    most_steps = tracer.batches_at_once
    _, reports, losses = _run_loop(components, take_step, steps, most_steps, carried.begin())
    return reports.stack(), carried.restore(losses)[0]


def _list_pieces(
    micro_batches: list[PerReplica],
    replicas: int,
    local_results: Callable[[PerReplica], tuple[tf.Tensor, ...]],
) -> Iterator[Structure]:
    """Yields the pieces of all micro-batches: those of the first replica, then of the next one."""
    for replica in range(replicas):
        for piece in micro_batches:
            yield tf.nest.map_structure(
                lambda value, replica=replica: local_results(value)[replica], piece
            )
