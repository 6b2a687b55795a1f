"""Private names of XLA: the ops that it can compile for a GPU, and lowering without running."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.util import pywrap_xla_ops


@functools.cache
def list_gpu_ops() -> frozenset[str]:
    """Returns the types of the ops that XLA can compile for a GPU, even where there is none.

    The list is not the whole answer: XLA may refuse an op of the list for its shapes or its dtype.
    """
    # Once TensorFlow has started without a GPU, its list for GPUs is empty. That for CPUs has the
    # same ops.
    names = pywrap_xla_ops.get_gpu_kernel_names() or pywrap_xla_ops.get_cpu_kernel_names()
    return frozenset(names)


def lower(function: Any, specs: Sequence[tf.TensorSpec], device: str) -> None:
    """Lowers a function to the language of XLA, which runs nothing and assigns no variable.

    Args:
        function: a ``tf.function`` with ``jit_compile``
        specs: of its arguments, in which all shapes are fixed
        device: the device for which it is lowered

    Raises:
        Exception: it cannot be lowered. TensorFlow raises errors of several types; the message has
            the op and the stack that created it.
    """
    generate = function.experimental_get_compiler_ir(*specs)
    with warnings.catch_warnings():
        # Without the name of a device, TensorFlow would draw a random number to find one.
        warnings.simplefilter("ignore")
        generate(stage="hlo", device_name=device)
