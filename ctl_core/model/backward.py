"""Adds the backward pass to the graph of a forward pass, to see what the backward pass does.

Only code with its own gradient function, such as ``tf.custom_gradient``, can write variables or
exchange values in the backward pass. The graphs of all other programs stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from ctl_core import compat
from ctl_core.hooks.hooks import Hooks
from ctl_core.model.forward import ReplicaObjective
from ctl_core.model.loss_calls import is_in_model, locate_calls
from ctl_core.numerics.randomness import draws_random_numbers
from ctl_core.numerics.variables import unwrap
from ctl_core.run.console import warn
from ctl_core.run.errors import StackFrame, format_error, read_calls
from ctl_core.types import Variable

# The beginnings of the types of ops that write variables.
_WRITING = ("Assign", "ResourceApply", "ResourceScatter")


@dataclasses.dataclass(frozen=True)
class BackwardOp:
    """An op of a backward pass, in the form that the checks of a graph need.

    Attributes:
        type: the type of the op
        traceback: the stack that created the op in the forward pass whose gradient this op belongs
            to, followed by the stack that created this op. The first stack says which hook or layer
            the op belongs to, and the second stack contains the line of the gradient function.
    """

    type: str
    traceback: Sequence[StackFrame]

    @property
    def is_in_model(self) -> bool:
        """True if the op belongs to the backward pass of the model."""
        return is_in_model(read_calls(self))


class SpecialOps(NamedTuple):
    """The ops of a forward pass whose gradients are not those of TensorFlow and Keras.

    Attributes:
        of_user: the ops with gradient functions of the user
        recomputed: the ops whose gradients run code of the forward pass again
    """

    of_user: list[tf.Operation]
    recomputed: list[tf.Operation]


def find_special_ops(operations: Iterable[tf.Operation]) -> SpecialOps:
    """Returns the ops whose gradients may do more than compute."""
    special = SpecialOps([], [])
    for op in operations:
        kind = compat.classify_gradient(op)
        if kind is compat.GradientKind.OWN:
            special.of_user.append(op)
        elif kind is compat.GradientKind.RECOMPUTED:
            special.recomputed.append(op)
    return special


def list_own_gradients(
    hooks: Hooks, special: SpecialOps, backward_ops: Iterable[BackwardOp]
) -> tuple[str, ...]:
    """Returns the lines that compute with gradient functions of the user, each with its hook.

    The result includes a ``tf.py_function`` only if there is one in the backward pass as well.

    Args:
        hooks: the hooks of the run
        special: the special ops of the forward pass, and of the functions that it calls
        backward_ops: the result of ``add_backward_pass``
    """
    needs_python = any(op.type == "EagerPyFunc" for op in backward_ops)
    lines = (
        locate_calls(hooks, read_calls(op))
        for op in special.of_user
        if needs_python or op.type != "EagerPyFunc"
    )
    return tuple(dict.fromkeys(lines))


def list_unjudged(hooks: Hooks, backward_ops: Iterable[BackwardOp]) -> tuple[str, ...]:
    """Returns the lines of a backward pass that draw random numbers or write variables.

    Args:
        hooks: the hooks of the run
        backward_ops: the result of ``add_backward_pass``
    """
    lines = (
        locate_calls(hooks, read_calls(op))
        for op in backward_ops
        if op.type.startswith(_WRITING) or draws_random_numbers(op)
    )
    return tuple(dict.fromkeys(lines))


def add_backward_pass(
    graph: compat.FunctionGraph,
    objectives: Iterable[ReplicaObjective],
    strategy: tf.distribute.Strategy,
) -> list[BackwardOp]:
    """Computes the gradients of objectives in the graph of their forward pass, the default graph.

    Args:
        graph: the graph of the forward pass, which is never run
        objectives: the objectives
        strategy: the strategy whose replicas train

    Returns:
        The ops of the backward pass, including those in the functions that it calls.
    """
    first = len(graph.get_operations())
    for objective in objectives:
        captured = _find_captures(graph, objective.variables, strategy)
        try:
            tf.gradients(objective.value, captured)
        except Exception as error:  # the step probably fails, too, and its message names the hook
            warn(f"the backward pass cannot be examined before training: {format_error(error)}")
            return []
    return [
        BackwardOp(called_op.type, _join_tracebacks(compat.find_forward_op(op), called_op))
        for op in graph.get_operations()[first:]
        for called_op in compat.add_called_ops([op])
    ]


def list_differentiated(
    graph: compat.FunctionGraph,
    objectives: Iterable[ReplicaObjective],
    variables: Iterable[tf.Variable],
    strategy: tf.distribute.Strategy,
) -> list[tf.Variable]:
    """Returns those of the variables with respect to which an objective has a gradient.

    Args:
        graph: the graph of the forward pass, the default graph, to which ops are added
        objectives: the objectives
        variables: the variables to try
        strategy: the strategy whose replicas train
    """
    values = [objective.value for objective in objectives]
    differentiated = []
    for variable in variables:
        captured = _find_captures(graph, [variable], strategy)
        try:
            gradients = tf.gradients(values, captured)
        except Exception:  # the step fails, too, and its message names the hook
            gradients = []
        if any(gradient is not None for gradient in gradients):
            differentiated.append(variable)
    return differentiated


def _find_captures(
    graph: compat.FunctionGraph, variables: Iterable[Variable], strategy: tf.distribute.Strategy
) -> list[tf.Tensor]:
    """Returns the handles of variables in a graph; none for variables that the graph ignores."""
    handles = {
        id(component.handle)
        for variable in variables
        for component in strategy.experimental_local_results(unwrap(variable))
    }
    return [inner for outer, inner in graph.captures if id(outer) in handles]


def _join_tracebacks(forward_op: tf.Operation | None, op: tf.Operation) -> list[StackFrame]:
    """Returns the stack of an op of the forward pass, followed by that of its gradient."""
    stack = list(op.traceback or ())
    if forward_op is not None:
        stack = [*(forward_op.traceback or ()), *stack]
    return stack
