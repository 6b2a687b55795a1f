"""Wraps private APIs of XLA: lists ops that can be compiled for a GPU, and lowers functions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.util import pywrap_xla_ops


@functools.cache
def list_gpu_ops() -> frozenset[str]:
    """Returns the types of the ops that XLA can compile for a GPU, even if there is no GPU.

    Even for a type in this list, XLA may refuse an op because of its shapes or its dtype.
    """
    # If TensorFlow has started without a GPU, its list for GPUs is empty. The list for CPUs
    # contains the same ops.
    names = pywrap_xla_ops.get_gpu_kernel_names() or pywrap_xla_ops.get_cpu_kernel_names()
    return frozenset(names)


def enter_xla() -> Any:
    """Enters the context in which ``tf.function`` traces a function that XLA compiles.

    ``get_concrete_function`` does not enter it. In the context, loops and slices are traced in ways
    that XLA can compile.
    """
    return polymorphic_function.OptionalXlaContext(is_compiled=True)


def lower(function: Any, specs: Sequence[tf.TensorSpec], device: str) -> None:
    """Lowers a function to XLA's HLO, without running it or assigning variables.

    Args:
        function: a ``tf.function`` with ``jit_compile``
        specs: the specifications of the function's arguments; all shapes must be fixed
        device: the device for which the function is lowered

    Raises:
        Exception: the function cannot be lowered. TensorFlow raises errors of several types; the
            message contains the op and the stack that created it.
    """
    generate = function.experimental_get_compiler_ir(*specs)
    with warnings.catch_warnings():
        # TensorFlow warns that ``device_name`` is deprecated. Without this argument, however, it
        # would draw a random number in order to find a device.
        warnings.simplefilter("ignore")
        generate(stage="hlo", device_name=device)
