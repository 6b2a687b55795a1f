"""Rejects steps on several devices that use the value of a variable with the aggregation SUM.

Each device has only the part of such a variable that it has added itself, and only the sum of all
parts is meaningful. A step may add to the variable. It may also multiply the parts by a constant,
because the sum is then multiplied, too. But everything else that a step computes from a part
depends on the number of devices, unless the parts are added up first.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from ctl_core.compat import FunctionGraph, find_called_graphs
from ctl_core.hooks.hooks import Hooks
from ctl_core.model.loss_calls import is_exchange, locate_calls
from ctl_core.model.state import State
from ctl_core.numerics.variables import is_summed, name_variable, unwrap
from ctl_core.run.errors import SetupError, read_calls
from ctl_core.run.live_objects import list_objects

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_ASSIGNMENTS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_PRODUCTS = ("Mul", "RealDiv", "Div", "DivNoNan")
# The types of ops to which a sum of parts may be added, or that only change the shape of a tensor.
_SUMS = (
    "Identity", "Reshape", "Squeeze", "ExpandDims", "Transpose", "Neg", "StopGradient",
    "PreventGradient", "EnsureShape", "CheckNumerics", "CheckNumericsV2", "AddV2", "Add", "AddN",
    "AccumulateNV2", "Sub",
)  # fmt: skip
# The types of ops that are linear in one of their inputs if the others are equal on all devices.
_LINEAR = (
    "Sum", "Mean", "StridedSlice", "Slice", "GatherV2", "Pack", "ConcatV2", "Tile", "BroadcastTo",
)  # fmt: skip
# The types of ops whose results are equal on all devices if their inputs are.
_ALIKE = (
    "Identity", "Cast", "Mul", "AddV2", "Add", "Sub", "RealDiv", "DivNoNan", "Pow", "Neg", "Exp",
    "Sqrt", "Maximum", "Minimum",
)  # fmt: skip


class Use(enum.IntEnum):
    """How a tensor was computed from the part of a variable."""

    SUMMAND = 1  # the sum of this tensor over the devices is the same on any number of devices
    OTHER = 2


class Trace(NamedTuple):
    """The origin of a tensor that was computed from the part of a variable.

    Attributes:
        use: how it was computed
        variable: the id of the variable
        read: the op that reads the part
    """

    use: Use
    variable: int
    read: tf.Operation


# The name of an op, and the index of one of its outputs.
TensorKey: TypeAlias = tuple[str, int]
Traces: TypeAlias = list[Trace | None]


class WrongUse(Exception):
    """A step uses the part of a variable in a way that depends on the number of devices."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace


def refuse_uses_of_parts(state: State, graph: FunctionGraph) -> None:
    """Rejects a step or an evaluation whose result depends on how a sum is divided among devices.

    Metrics of hooks are ignored, because only their sums are read. Does nothing if there is no
    other variable with the aggregation SUM.

    Args:
        state: the state of the run
        graph: the graph of a step; the graphs of evaluations have been traced, too

    Raises:
        SetupError: a part is used; the message names the line that reads the variable.
    """
    strategy = state.strategy
    if strategy.num_replicas_in_sync == 1:
        return
    variables = list_parts(state)
    if not variables:
        return
    # All metrics that exist, including those of layers.
    metrics = [unwrap(v) for metric in list_objects(keras.Metric) for v in metric.variables]
    search = Search(
        by_handle={
            id(component.handle): id(variable)
            for variable in (*variables, *metrics)
            for component in strategy.experimental_local_results(variable)
        },
        followed=frozenset(map(id, variables)),
        of_metrics=frozenset(map(id, metrics)),
    )
    graphs = [graph]
    if state.evaluation is not None:
        graphs += state.evaluation.list_graphs()
    for searched_graph in graphs:
        try:
            search.search(searched_graph)
        except WrongUse as error:
            raise _describe(state.hooks, variables, error.trace) from None


def list_parts(state: State) -> list[tf.Variable]:
    """Returns the variables with the aggregation SUM, except those of the metrics of hooks."""
    metrics = state.components.list_logged_metrics().values()
    ignored = {id(unwrap(variable)) for metric in metrics for variable in metric.variables}
    if state.evaluation is not None:
        ignored |= {id(unwrap(variable)) for variable in state.evaluation.list_passing_variables()}
    return [
        variable
        for variable in state.recording.variables.values()
        if is_summed(variable)
        and variable.aggregation == tf.VariableAggregation.SUM
        and id(variable) not in ignored
    ]


def _describe(hooks: Hooks, variables: list[tf.Variable], trace: Trace) -> SetupError:
    """Returns the error for a wrong use."""
    name = next(name_variable(v) for v in variables if id(v) == trace.variable)
    return SetupError(
        f"{locate_calls(hooks, read_calls(trace.read))}: reads {name}, a variable with the "
        "aggregation SUM, of which each device has only its own part; add up the parts with "
        "ctl_core.all_reduce, or train with logical_replicas."
    )


@dataclasses.dataclass
class Search:
    """Follows the parts of variables through graphs.

    Attributes:
        by_handle: the ids of variables by the ids of their handles on this process's devices
        followed: the ids of the variables to follow
        of_metrics: the ids of the variables of metrics. The value of a metric may have an effect on
            the variables of metrics.
    """

    by_handle: Mapping[int, int]
    followed: frozenset[int]
    of_metrics: frozenset[int]

    def search(self, graph: FunctionGraph) -> None:
        """Searches a graph that the engine calls.

        Raises:
            WrongUse: a part has an effect on something else, or the graph returns it.
        """
        captured = {id(inner): self.by_handle.get(id(outer)) for outer, inner in graph.captures}
        handles = [captured.get(id(tensor)) for tensor in graph.inputs]
        for trace in self.follow(graph, handles, [None] * len(handles), None):
            if trace is not None:
                raise WrongUse(trace)

    def follow(
        self,
        graph: FunctionGraph,
        handles: Sequence[int | None],
        inputs: Sequence[Trace | None],
        condition: Trace | None,
    ) -> Traces:
        """Follows parts through the graph of a function.

        Args:
            graph: the graph
            handles: for each input, the id of the variable whose handle it is; None for others
            inputs: the traces of the inputs
            condition: the trace of the condition under which the function is called, if any

        Returns:
            The traces of the outputs.
        """
        walk = GraphWalk(self, condition)
        for tensor, handle, trace in zip(graph.inputs, handles, inputs, strict=True):
            walk.set(tensor, handle, trace)
        for op in graph.get_operations():
            walk.visit(op)
        return [condition or walk.get_trace(tensor) for tensor in graph.outputs]


class GraphWalk:
    """Visits the ops of one graph in their order."""

    def __init__(self, search: Search, condition: Trace | None) -> None:
        """Starts a walk; see ``Search.follow`` for the arguments."""
        self._search = search
        self._condition = condition
        self._handles: dict[TensorKey, int] = {}
        self._traces: dict[TensorKey, Trace] = {}

    def set(self, tensor: tf.Tensor, handle: int | None, trace: Trace | None) -> None:
        """Sets the variable whose handle a tensor is, and the trace of a tensor."""
        if handle is not None:
            self._handles[_key(tensor)] = handle
        if trace is not None:
            self._traces[_key(tensor)] = trace

    def get_handle(self, tensor: tf.Tensor) -> int | None:
        """Returns the id of the variable whose handle a tensor is."""
        return self._handles.get(_key(tensor))

    def get_trace(self, tensor: tf.Tensor) -> Trace | None:
        """Returns the trace of a tensor; None if it was not computed from any part."""
        return self._traces.get(_key(tensor))

    def visit(self, op: tf.Operation) -> None:
        """Determines the traces of the outputs of an op.

        Raises:
            WrongUse: the op writes something that was computed from a part.
        """
        traces = [self.get_trace(tensor) for tensor in op.inputs]
        handles = [self.get_handle(tensor) for tensor in op.inputs]
        graphs = find_called_graphs(op)
        if not any(traces) and not any(handles) and self._condition is None:
            return
        if graphs:
            self._call(op, graphs, handles, traces)
        elif op.type in _READS:
            self._read(op, handles[0], traces)
        elif any(tensor.dtype == tf.resource for tensor in op.inputs):
            self._check_effect(op, handles[0], traces)
        else:
            self._pass_on(op, traces)

    def _read(self, op: tf.Operation, handle: int | None, traces: Traces) -> None:
        """Sets the trace of an op that reads a variable."""
        if handle not in self._search.followed:
            self._pass_on(op, traces)
            return
        use = Use.OTHER
        if op.type == "ReadVariableOp":
            use = Use.SUMMAND
        self.set(op.outputs[0], None, Trace(use, handle, op))

    def _check_effect(self, op: tf.Operation, handle: int | None, traces: Traces) -> None:
        """Checks an op that may change a variable or another resource."""
        if op.type == "Identity":
            self.set(op.outputs[0], handle, None)
        elif not op.type.startswith(("Write", "VariableShape")):  # summaries change no resource
            for trace in (self._condition, *traces):
                if trace is not None and not self._may_write(op, handle, trace):
                    raise WrongUse(trace)

    def _may_write(self, op: tf.Operation, handle: int | None, trace: Trace) -> bool:
        """Returns whether an op may write what was computed from a part."""
        of_metrics = self._search.of_metrics
        if trace.variable in of_metrics and handle in of_metrics:
            return True
        is_own = handle == trace.variable and op.type in _ASSIGNMENTS
        return is_own and trace.use is Use.SUMMAND

    def _call(
        self,
        op: tf.Operation,
        graphs: list[FunctionGraph],
        handles: Sequence[int | None],
        traces: Traces,
    ) -> None:
        """Follows parts through the functions that an op calls: a call, a branch or a loop."""
        condition = self._condition
        if op.type.endswith(("If", "Case")):
            condition = condition or _as_other(traces[0])
            handles = handles[1:]
            traces = traces[1:]
        if any(len(graph.inputs) != len(traces) for graph in graphs):  # an op of another kind
            self._pass_on(op, traces)
            return
        if op.type.endswith("While"):
            outputs = self._loop(graphs, handles, traces)
        else:
            results = [self._search.follow(graph, handles, traces, condition) for graph in graphs]
            outputs = [_join(branches) for branches in zip(*results, strict=True)]
        for tensor, trace in zip(op.outputs, outputs, strict=False):
            self.set(tensor, None, trace)

    def _loop(
        self, graphs: list[FunctionGraph], handles: Sequence[int | None], traces: Traces
    ) -> Traces:
        """Follows parts through the rounds of a loop until nothing changes."""
        body, goes_on = graphs
        condition = self._condition
        while True:
            (trace,) = self._search.follow(goes_on, handles, traces, condition)
            condition = condition or _as_other(trace)
            outputs = self._search.follow(body, handles, traces, condition)
            updated = [_join(pair) for pair in zip(traces, outputs, strict=True)]
            if updated == traces:
                return updated
            traces = updated

    def _pass_on(self, op: tf.Operation, traces: Traces) -> None:
        """Sets the traces of the outputs of an op that changes no resource."""
        trace = _join(traces)
        if trace is None:
            return
        is_summand = trace.use is Use.SUMMAND
        if is_summand and is_exchange(read_calls(op)):
            return  # the result is the sum of all parts
        if op.type == "IdentityN":
            for tensor, own_trace in zip(op.outputs, traces, strict=True):
                self.set(tensor, None, own_trace)
            return
        if is_summand and not self._is_summand(op, traces):
            trace = _as_other(trace)
        for tensor in op.outputs:
            self.set(tensor, None, trace)

    def _is_summand(self, op: tf.Operation, traces: Traces) -> bool:
        """Returns whether the result of an op is a summand if its traced inputs are summands."""
        if op.type in _SUMS:
            return True
        if op.type == "Cast":
            return op.outputs[0].dtype.is_floating or not op.inputs[0].dtype.is_floating
        if op.type in ("SelectV2", "Select"):
            condition, *branches = traces
            return condition is None and all(branches)
        others = [tensor for tensor, trace in zip(op.inputs, traces, strict=True) if trace is None]
        if op.type in _PRODUCTS:
            is_linear = len(others) == 1 and (op.type == "Mul" or traces[0] is not None)
        else:
            is_linear = op.type in _LINEAR
        return is_linear and all(map(self._is_alike, others))

    def _is_alike(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor certainly has the same value on all devices."""
        if tf.get_static_value(tensor) is not None:
            return True
        if self.get_trace(tensor) is not None:
            return False
        op = tensor.op
        if op.type == "ReadVariableOp":
            return self.get_handle(op.inputs[0]) is None
        return op.type in _ALIKE and all(map(self._is_alike, op.inputs))


def _key(tensor: tf.Tensor) -> TensorKey:
    """Returns the key of a tensor of the graph of a walk."""
    return tensor.op.name, tensor.value_index


def _as_other(trace: Trace | None) -> Trace | None:
    """Returns a trace with the use ``OTHER``."""
    if trace is None:
        return None
    return trace._replace(use=Use.OTHER)


def _join(traces: Iterable[Trace | None]) -> Trace | None:
    """Returns the trace of a tensor that is computed from all tensors with the given traces."""
    known = [trace for trace in traces if trace is not None]
    if not known:
        return None
    joined = max(known, key=lambda trace: trace.use)
    if len({trace.variable for trace in known}) > 1:
        return _as_other(joined)
    return joined
