"""Compiles functions with XLA, and tests whether XLA can compile them before they run."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import tensorflow as tf

from ctl_core.cluster.replica_contexts import forbid_exchanges
from ctl_core.compat import GraphWriter, add_called_ops, list_gpu_ops, lower
from ctl_core.hooks.hooks import Hooks
from ctl_core.model.components import Components
from ctl_core.model.failures import find_line
from ctl_core.run.errors import NotCompilable, format_error
from ctl_core.types import GraphFunction, Structure

# The op type of a graph's inputs.
_INPUT = "Placeholder"
# The beginning of XLA's error messages about lowering, and the pattern of an op's name in them.
_LOWERING_FAILED = "ValueError: Failed getting HLO text: '"
_NODE = re.compile(r"\{\{node ([^{}]+)\}\}")
# The types of ops that XLA cannot compile if ops have to be deterministic, even on a CPU.
_NOT_DETERMINISTIC = frozenset({"MaxPoolGrad", "MaxPool3DGrad"})
_CUDNN_CURE = "; create its layer with use_cudnn=False, which XLA can compile"


NOT_COMPILABLE = (
    "jit_compile cannot compile tf.summary or exchanges between replicas; leave these out, or "
    "train with --no-jit-compile"
)


class Executable:
    """A function that XLA compiles when it is first called.

    The function is traced separately from other graphs. It gets all its tensors as arguments and
    captures none from another graph. This makes it possible to test whether XLA can compile the
    function without running anything.
    """

    def __init__(
        self, components: Components, function: Callable[..., Structure], *specs: Structure
    ) -> None:
        """Traces the function.

        Args:
            components: the components of the step that the function computes
            function: the function; it takes one structure of tensors for each of ``specs``
            specs: the specifications of the function's arguments; all shapes are fixed
        """

        @tf.function(jit_compile=True, autograph=False)
        def compiled(*tensors: tf.Tensor) -> Structure:
            return function(*tf.nest.pack_sequence_as(specs, tensors))

        self._hooks = components.hooks
        self._device = components.strategy.extended.worker_devices[0]
        self._specs: list[tf.TensorSpec] = tf.nest.flatten(specs)
        self._function: GraphFunction = compiled
        self._concrete = compiled.get_concrete_function(*self._specs)

    def __call__(self, *arguments: Structure) -> Any:
        """Calls the function with structures of tensors, eagerly or inside another graph."""
        return self._concrete(*tf.nest.flatten(arguments))

    @functools.cached_property
    def obstacle(self) -> str | None:
        """The reason why XLA cannot compile the function, with hook and line; None if it can.

        Nothing is run, and no variable is assigned. The types of the ops are compared with the
        types that XLA can compile for a GPU, whatever the device is. Shapes and dtypes are tested
        by lowering the function for its own device, because lowering for a GPU requires a GPU.
        """
        op = find_uncompilable_op(self._concrete.graph)
        if op is not None:
            return describe_op(op, self._hooks)
        try:
            lower(self._function, self._specs, self._device)
        except (ValueError, TypeError, tf.errors.OpError) as error:
            return describe_failure(error, self._concrete.graph, self._hooks)
        return None


def find_uncompilable_op(graph: tf.Graph) -> tf.Operation | None:
    """Returns the first op of a graph that XLA cannot compile for a GPU; None if there is none."""
    for op in add_called_ops(graph.get_operations()):
        if op.type != _INPUT and op.type not in list_gpu_ops():
            return op
    return None


def find_obstacle_to_determinism(graph: tf.Graph, hooks: Hooks) -> str | None:
    """Returns why XLA cannot compile a graph into deterministic ops; None if no op prevents it."""
    op = find_uncompilable_op(graph)
    if op is not None:
        return describe_op(op, hooks)
    for op in add_called_ops(graph.get_operations()):
        if op.type in _NOT_DETERMINISTIC:
            # The message has the name of the op, which contains the layer's name, rather than the
            # line of the op, which is in Keras.
            return f"{op.name} cannot be compiled into a deterministic op"
    return None


def describe_op(op: tf.Operation, hooks: Hooks) -> str:
    """Returns a message such as ``AsString in input_pre (callbacks.py:31) cannot be compiled``."""
    text = op.type
    line = find_line(op, hooks)
    if line is not None:
        text += f" in {line}"
    text += " cannot be compiled"
    if op.type.startswith("Cudnn"):
        text += _CUDNN_CURE
    return text


def describe_failure(error: Exception, graph: tf.Graph, hooks: Hooks) -> str:
    """Describes why a graph cannot be lowered, with op, hook and line if they are known.

    XLA's message contains a stack, but without complete file names. Therefore, the op is looked up
    in the graph by its name.
    """
    reason = format_error(error, 160).removeprefix(_LOWERING_FAILED)
    named = _NODE.search(str(error))
    if named is not None:
        for op in add_called_ops(graph.get_operations()):
            if op.name == named[1]:
                return f"{describe_op(op, hooks)} ({reason})"
    return f"the step cannot be compiled ({reason})"


@contextlib.contextmanager
def forbid_uncompilable() -> Iterator[None]:
    """Rejects an executable of a replica that writes a summary, or exchanges values with replicas.

    Raises:
        NotCompilable: the code in the ``with`` block writes a summary or exchanges a value.
    """
    with forbid_exchanges(refuse_to_compile), GraphWriter(refuse_to_compile).as_default():
        yield


def refuse_to_compile() -> NoReturn:
    """Raises ``NotCompilable``; replaces a function that XLA cannot compile."""
    raise NotCompilable(NOT_COMPILABLE)
