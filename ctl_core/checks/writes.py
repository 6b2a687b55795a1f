"""What the forward pass writes to variables, as a layer with a moving average of its own does.

Each replica would write what its own examples give, and each micro-batch what its own give: another
value than that of the whole batch. What a value is worked out from, and whether a sum over the
replicas lies between, is read off the graph of the forward hooks before anything is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.autograph import file_name
from ctl_core.compat import written_resources
from ctl_core.context import StepContext
from ctl_core.errors import SetupError
from ctl_core.numerics.batch_norm import moving_statistics
from ctl_core.numerics.randomness import draws
from ctl_core.run_state.tracking import ENGINE, Found, is_own_file, plain_variable, tf_variable

# What a tensor is worked out from, in bits: something that differs between replicas, something
# that is the same on all but no constant, and further on the variables. A handle is negative.
_DIFFERS, _DEPENDS, _FIRST_VARIABLE = 1, 2, 4
_SHAPES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
_READING = (
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VariableShape",
    "VarIsInitializedOp",
)
_SAME = "same_on_all_replicas"


def same_on_all_replicas(value: Any) -> Any:
    """Marks tensors in the graph of the forward hooks as what replicas have exchanged."""
    return tf.nest.map_structure(
        lambda part: tf.identity(part, name=_SAME), value, expand_composites=True
    )


@dataclasses.dataclass(frozen=True)
class Write:
    """That a forward pass writes to a variable.

    Attributes:
        handle: of the variable, or of one replica's part of it
        differs: whether the value is worked out from a replica's own examples or random numbers
        depends: whether it is worked out from examples at all
        reads: ids of the handles of the variables that it is worked out from
        where: ``callbacks.py:12``, or an empty text
    """

    handle: Any
    differs: bool
    depends: bool
    reads: frozenset[int]
    where: str


def forward_writes(graph: Any) -> list[Write]:
    """Finds the ops of a graph that write to variables from outside of it, however deep.

    Args:
        graph: that of the forward hooks on one replica, with placeholders for the batch
    """
    if not written_resources(graph):
        return []
    outer = [handle for handle, inner in graph.captures if inner.dtype == tf.resource]
    number = {id(handle): index for index, handle in enumerate(outer)}
    values = {
        inner.op.name: [-1 - number[id(handle)] if id(handle) in number else 0]
        for handle, inner in graph.captures
    }
    definition = graph.as_graph_def()
    flow = _Flow({function.signature.name: function for function in definition.library.function})
    found = []
    for node in definition.node:
        flow.written.clear()
        flow.add(node, values, 0)
        for index, sources in flow.written:
            reads = (h for n, h in enumerate(outer) if sources & _FIRST_VARIABLE << n)
            found.append(
                Write(
                    outer[index],
                    bool(sources & _DIFFERS),
                    bool(sources & (_DIFFERS | _DEPENDS)),
                    frozenset(map(id, reads)),
                    _where(graph.get_operation_by_name(node.name)),
                )
            )
    return found


class _Flow:
    """Follows what tensors are worked out from, through functions, branches and loops.

    Attributes:
        written: pairs of a variable's number and what is written to it, as they are met
    """

    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions
        self.written: list[tuple[int, int]] = []

    def add(self, node: Any, values: dict[str, list[int]], condition: int) -> None:
        """Works out what the outputs of a node depend on.

        Args:
            node: a NodeDef; those that its inputs come from have been added
            values: by node, of each output, or of all of them
            condition: what it depends on whether the node runs
        """
        if node.name in values:
            return
        inputs = [_input(name, values) for name in node.input if name[0] != "^"]
        attributes = node.attr
        if "branches" in attributes or "then_branch" in attributes:
            several = attributes["branches"].list.func if "branches" in attributes else ()
            several = several or [attributes["then_branch"].func, attributes["else_branch"].func]
            condition |= inputs[0]
            ends = [self._call(branch.name, inputs[1:], condition) for branch in several]
            outputs = [_union([*each, inputs[0]]) for each in zip(*ends, strict=True)]
        elif "body" in attributes and "cond" in attributes:
            outputs = self._loop(node, inputs, condition)
        elif "f" in attributes and "PartitionedCall" in node.op:
            outputs = self._call(attributes["f"].func.name, inputs, condition)
        else:
            outputs = [self._simple(node, inputs, condition)]
        values[node.name] = outputs or [0]

    def _call(self, name: str, inputs: list[int], condition: int) -> list[int]:
        function = self._functions[name]
        arguments = [argument.name for argument in function.signature.input_arg]
        values = {name: [value] for name, value in zip(arguments, inputs, strict=True)}
        for node in function.node_def:
            self.add(node, values, condition)
        return [_input(function.ret[out.name], values) for out in function.signature.output_arg]

    def _loop(self, node: Any, inputs: list[int], condition: int) -> list[int]:
        before: list[int] = []
        while inputs != before:
            before = inputs
            goes_on = self._call(node.attr["cond"].func.name, inputs, condition)[0]
            body = self._call(node.attr["body"].func.name, inputs, condition | goes_on)
            inputs = [a if a == b else a | b | goes_on for a, b in zip(inputs, body, strict=True)]
        return inputs

    def _simple(self, node: Any, inputs: list[int], condition: int) -> int:
        if node.op == "Placeholder":  # of the batch; those of captures are known
            return _DIFFERS | _DEPENDS
        if node.op == "Identity" and inputs[0] < 0:
            return inputs[0]
        variables = [-1 - value for value in inputs if value < 0]
        sources = _union(value for value in inputs if value >= 0)
        if node.op not in _READING:
            self.written += [(variable, sources | condition) for variable in variables]
        if node.op in _SHAPES or not sources | len(variables) | ("seed" in node.attr):
            return 0
        if node.name.rpartition("/")[-1].startswith(_SAME):
            return _DEPENDS if sources else 0
        if "seed" in node.attr and draws(node):
            sources |= _DIFFERS | _DEPENDS
        return _union([sources, *(_FIRST_VARIABLE << variable for variable in variables)])


def _input(name: str, values: dict[str, list[int]]) -> int:
    """Looks up ``node``, ``node:1`` or ``node:output:1``; what is not known may be anything."""
    node, *rest = name.split(":")
    several = values.get(node, [_DIFFERS | _DEPENDS])
    return several[int(rest[-1]) if rest and len(several) > 1 else 0]


def _union(values: Iterable[int]) -> int:
    union = 0
    for value in values:
        union |= value
    return union


def _where(op: tf.Operation) -> str:
    """Returns the innermost line of the user's own that the engine has led to, if there is one."""
    found = ""
    for frame in op.traceback:
        if is_own_file(frame.filename):
            found = f"{file_name(frame.filename)}:{frame.lineno}"
        elif frame.filename.startswith(ENGINE):
            found = ""
    return found


def check_writes(
    writes: list[Write], context: StepContext, found: Found, strategy: tf.distribute.Strategy
) -> list[str]:
    """Looks for variables that would not get what one device gives them.

    Left out are the moving statistics of Keras' batch normalisation and random generators, of
    which the engine takes care, and what is summed up over the replicas when read, as in metrics.

    Returns:
        Warnings of variables that replicas share although each gives another value, or that each
        micro-batch writes to.

    Raises:
        SetupError: replicas would have different variables.
    """
    cared_for = {*map(id, found.generators), *map(id, moving_statistics(found.layers))}
    local = strategy.experimental_local_results
    handles, own = {}, set()
    for path, item in found.variables.items():
        variable = tf_variable(item)
        of_replicas = {id(part.handle) for part in local(variable) if isinstance(part, tf.Variable)}
        on_read = getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ
        summed = on_read and variable.aggregation == tf.VariableAggregation.SUM
        engines = isinstance(item, tf.random.Generator) or id(variable) in cared_for
        if on_read or engines:
            own |= of_replicas
        if not (summed or engines):
            handles[path] = of_replicas
    warnings = []
    for path, of_replicas in handles.items():
        to_it = [write for write in writes if id(write.handle) in of_replicas]
        item, several = found.variables[path], context.replicas
        unlike = [write for write in to_it if write.differs or write.reads & own]
        partial = [write for write in to_it if write.depends or write.reads - of_replicas]
        if several > 1 and unlike:
            aggregation = getattr(plain_variable(item), "aggregation", None)
            everywhere = len(of_replicas) > 1 and of_replicas <= {id(w.handle) for w in unlike}
            if aggregation == tf.VariableAggregation.NONE and not everywhere:
                raise SetupError(_refusal(found, path, unlike[0], several))
            warnings.append(_shared(found, path, unlike[0], aggregation))
        elif context.accumulate_steps > 1 and partial:
            warnings.append(_accumulated(found, path, partial[0], context.accumulate_steps))
    return warnings


_EXCHANGE = "value = ctl_core.all_reduce(value, 'mean') before, or 'sum' for a sum"


def _refusal(found: Found, path: str, write: Write, replicas: int) -> str:
    if layer := _stateful(found, path):
        return (
            f"{path} is the state that the layer '{layer.name}', {type(layer).__name__}"
            f"(stateful=True), carries from batch to batch, and each of {replicas} replicas would "
            "carry one of its own, of which a checkpoint holds the first; train it with strategy "
            "one_device, or give the state with the batch as initial_state."
        )
    said = (
        f"{_assigns(found, path, write)} what one replica's examples or random numbers give, so "
        f"that {replicas} replicas would no longer have the same model; assign what is the same "
        f"on all: {_EXCHANGE}."
    )
    if not getattr(found.variables[path], "trainable", False):
        return said
    return (
        f"{said} A weight is the optimizer's to change; steps that a forward pass takes by itself "
        "are those of copies, given to model.stateless_call."
    )


def _shared(found: Found, path: str, write: Write, aggregation: Any) -> str:
    kept = str(getattr(aggregation, "name", "no")).lower().replace("_", " ")
    return (
        f"{_assigns(found, path, write)} what each replica's own examples or random numbers give, "
        f"with the aggregation {kept}, which may be another value than one device assigns; to be "
        f"sure, make it the same on all: {_EXCHANGE}."
    )


def _accumulated(found: Found, path: str, write: Write, steps: int) -> str:
    if layer := _stateful(found, path):
        return (
            f"{path} is the state that the layer '{layer.name}', {type(layer).__name__}"
            f"(stateful=True), carries from one of the {steps} micro-batches of a step to the "
            "next, which has other examples; leave out accumulate_steps."
        )
    return (
        f"{_assigns(found, path, write)} in each of the {steps} micro-batches of a step, by what "
        "that alone gives, where the whole batch would do it once: weights will not be those of "
        "the whole batch; return what is assigned with the output instead, and assign in "
        "update_pre, which gets the output of all micro-batches."
    )


def _assigns(found: Found, path: str, write: Write) -> str:
    return f"{write.where or 'the forward pass'}: assigns to {_of(found, path)}"


def _of(found: Found, path: str) -> str:
    layer = _layer(found, path)
    return path + (f" (of the layer '{layer.name}', {type(layer).__name__})" if layer else "")


def _layer(found: Found, path: str) -> keras.Layer | None:
    """Returns the layer that made a variable: of those that have it, the one with the fewest."""
    variable = found.variables[path]
    having = [layer for layer in found.layers if any(v is variable for v in layer.variables)]
    return min(having, key=lambda layer: len(layer.variables), default=None)


def _stateful(found: Found, path: str) -> keras.Layer | None:
    """Returns the recurrent layer whose state a variable is."""
    layers = (layer for layer in found.layers if getattr(layer, "stateful", False))
    states = ((one, tf.nest.flatten(getattr(one, "states", None) or [])) for one in layers)
    variable = found.variables[path]
    return next((one for one, own in states if any(v is variable for v in own)), None)
