"""Wraps private TensorFlow APIs for the gradients of ops, and for the graph of a backward pass."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import ops

# The folders of TensorFlow and Keras.
_LIBRARIES = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (tf, keras))
_GRADIENT_NAME = "_gradient_op_type"


def has_own_gradient(op: tf.Operation) -> bool:
    """Returns whether the gradient of an op was written outside of TensorFlow and Keras.

    The gradients of TensorFlow and Keras, including their custom gradients such as that of
    ``tf.nn.silu``, are linear and do not write variables. A public function of TensorFlow that
    someone else returns as a gradient function, such as ``tf.sign``, need not be linear, so the
    result is True. The Python function of a ``tf.py_function`` may contain anything.
    """
    if op.type == "EagerPyFunc":
        return True
    function = _find_gradient_function(op)
    if function is None:
        return False
    function = inspect.unwrap(getattr(function, "func", function))
    if not _is_of_library(function):
        return True
    return _GRADIENT_NAME in op.node_def.attr and "<locals>" not in function.__qualname__


def recomputes_forward_pass(op: tf.Operation) -> bool:
    """Returns whether the gradient of an op runs code of the forward pass again.

    This is the case for ``tf.recompute_grad``, which Keras uses for ``keras.remat``.
    """
    function = _find_gradient_function(op)
    return getattr(function, "__qualname__", "").startswith("recompute_grad.")


def find_forward_op(op: tf.Operation) -> tf.Operation | None:
    """Returns the op whose gradient created an op of ``tf.gradients``; None if there is none.

    For example, TensorFlow itself creates the ops that add up gradients.
    """
    return op._original_op


def _find_gradient_function(op: tf.Operation) -> Callable[..., Any] | None:
    """Returns the function that computes the gradient of an op; None if there is none.

    For an op that ``tf.custom_gradient`` has created, this is the function that the decorated
    function returned.
    """
    name = op.type
    if _GRADIENT_NAME in op.node_def.attr:
        name = op.get_attr(_GRADIENT_NAME).decode()
    try:
        function = ops.gradient_registry.lookup(name)
    except LookupError:
        return None
    for variable in ("tape_grad_fn", "grad_fn"):  # the closures of tf.custom_gradient
        if function is not None and _is_of_library(function):
            function = _read_closure(function).get(variable, function)
    return function  # type: ignore[no-any-return]


def _read_closure(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the variables of the closure of a function by name."""
    names = function.__code__.co_freevars
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}


def _is_of_library(function: Callable[..., Any]) -> bool:
    """Returns whether the code of a function belongs to TensorFlow or Keras."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_LIBRARIES)
