"""Wraps private TensorFlow APIs for the gradients of ops, and for the graph of a backward pass."""

from __future__ import annotations

import contextlib
import enum
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import ops

# The folders of TensorFlow and Keras.
_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (tf.__file__, keras.__file__))
_GRADIENT_NAME = "_gradient_op_type"


class GradientKind(enum.Enum):
    """Who wrote the gradient of an op."""

    BUILT_IN = enum.auto()  # TensorFlow or Keras: it is linear, and writes no variables
    RECOMPUTED = enum.auto()  # tf.recompute_grad or keras.remat: it runs the forward pass again
    OWN = enum.auto()  # someone else: it may do anything


def classify_gradient(op: tf.Operation) -> GradientKind:
    """Returns who wrote the gradient of an op.

    The custom gradients of TensorFlow and Keras, such as that of ``tf.nn.silu``, are built in. A
    public function of TensorFlow that someone else returns as a gradient function, such as
    ``tf.sign``, need not be linear, so the gradient is ``OWN``. So is that of a ``tf.py_function``,
    whose Python function may contain anything.
    """
    if op.type == "EagerPyFunc":
        return GradientKind.OWN
    has_name = _GRADIENT_NAME in op.node_def.attr
    function = _find_gradient_function(op, has_name)
    if function is None:
        return GradientKind.BUILT_IN
    function = inspect.unwrap(getattr(function, "func", function))
    if not _is_of_library(function) or (has_name and "<locals>" not in function.__qualname__):
        return GradientKind.OWN
    if function.__qualname__.startswith("recompute_grad."):
        return GradientKind.RECOMPUTED
    return GradientKind.BUILT_IN


def find_forward_op(op: tf.Operation) -> tf.Operation | None:
    """Returns the op whose gradient created an op of ``tf.gradients``; None if there is none.

    For example, TensorFlow itself creates the ops that add up gradients.
    """
    return op._original_op


def _find_gradient_function(op: tf.Operation, has_name: bool) -> Callable[..., Any] | None:
    """Returns the function that computes the gradient of an op; None if there is none.

    For an op that ``tf.custom_gradient`` has created, this is the function that the decorated
    function returned.

    Args:
        op: the op
        has_name: whether the op has the name of a gradient function
    """
    name = op.type
    if has_name:
        name = op.get_attr(_GRADIENT_NAME).decode()
    function = getattr(op.graph, "_ctl_custom_gradients", {}).get(name)
    if function is None:
        try:
            function = ops.gradient_registry.lookup(name)
        except LookupError:
            return None
    for variable in ("tape_grad_fn", "grad_fn"):  # the closures of tf.custom_gradient
        if function is not None and _is_of_library(function):
            function = _read_closure(function).get(variable, function)
    gradient: Callable[..., Any] | None = function
    return gradient


def _read_closure(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the variables of the closure of a function by name."""
    names = function.__code__.co_freevars
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}


def _is_of_library(function: Callable[..., Any]) -> bool:
    """Returns whether the code of a function belongs to TensorFlow or Keras."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_LIBRARIES)


def forget_custom_gradients() -> None:
    """Makes TensorFlow forget all custom gradients; functions that use them cannot be traced again.

    TensorFlow keeps the gradient of each ``tf.custom_gradient`` in a traced function until the
    process ends, and with it the graph of the function and everything that the graph captured.
    """
    registry = ops.gradient_registry._registry
    for name in list(registry):
        if name.startswith("CustomGradient-"):
            del registry[name]


@contextlib.contextmanager
def release_custom_gradients() -> Iterator[None]:
    """Lets graphs that are traced inside the context be deleted once nothing uses them any more.

    TensorFlow keeps the gradient of each ``tf.custom_gradient`` in a registry, and with it the
    graph in which the gradient is used. When the context ends, each gradient that was registered
    inside is handed to its graph, and the registry only refers to the graph. So the gradient still
    works while anything uses the graph, such as a function that the caller keeps. Models that were
    loaded from a SavedModel keep their gradients, because these belong to no single graph.
    """
    registry = ops.gradient_registry._registry
    before = set(registry)
    try:
        yield
    finally:
        for name in registry.keys() - before:
            if name.startswith("CustomGradient-"):
                _hand_to_graph(name)


def _hand_to_graph(name: str) -> None:
    """Moves a registered gradient to the graph that uses it.

    The name of the gradient is removed from the registry when the graph is deleted.
    """
    registry = ops.gradient_registry._registry
    gradient = registry[name]["type"]
    graph: Any = _find_graph(gradient)  # gets an attribute that no other graph has
    if graph is None:
        return
    if not hasattr(graph, "_ctl_custom_gradients"):
        graph._ctl_custom_gradients = {}
    graph._ctl_custom_gradients[name] = gradient
    reference = weakref.ref(graph)

    def compute_gradient(*arguments: Any) -> Any:
        """Calls the gradient. An op of the graph has requested it, so the graph still exists."""
        existing = reference()
        assert existing is not None
        return existing._ctl_custom_gradients[name](*arguments)

    registry[name]["type"] = compute_gradient
    weakref.finalize(graph, registry.pop, name, None).atexit = False


def _find_graph(gradient: Callable[..., Any]) -> tf.Graph | None:
    """Returns the graph that uses a registered gradient; None if it belongs to no single graph."""
    closure = _read_closure(gradient)
    if "tape_grad_fn" not in closure:
        return None
    result = _read_closure(closure["tape_grad_fn"])["result"]
    for tensor in tf.nest.flatten(result, expand_composites=True):
        if tf.is_symbolic_tensor(tensor):
            graph: tf.Graph = tensor.graph
            return graph
    return None
