"""Compilation with XLA: of what one replica does with a batch, and how elements are stacked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl_core.compat import GraphWriter

# A stack holds at most so many bytes, and so many steps: more gain nothing.
STACK_BYTES = 2**26
STACK_STEPS = 100


def compiled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Compiles what one replica does with a batch.

    A function of its own for each replica and each graph: a cached trace of another replica would
    hold that replica's variables.
    """

    def on_replica(batch: Any) -> Any:
        @tf.function(jit_compile=True, autograph=False)
        def on_device(batch: Any) -> Any:
            with GraphWriter(no_summaries).as_default():
                return function(batch)

        return on_device(batch)

    return on_replica


def no_summaries() -> None:
    """Refuses tf.summary, which an executable cannot write."""
    raise ValueError(
        "tf.summary in a step that jit_compile compiles; write it in a host hook, or leave out "
        "jit_compile"
    )


@dataclasses.dataclass(frozen=True)
class Stack:
    """How elements are stacked.

    Attributes:
        spec: of an element, with all its sizes
        steps: how many steps a stack is for
    """

    spec: Any
    steps: int


def stack_of(element_spec: Any, rows: int | None, micro_batches: int) -> Stack | None:
    """Returns how elements are stacked; None if they cannot be.

    They have to be dense and of one shape.

    Args:
        element_spec: of one element, a micro-batch
        rows: how many each of its tensors has where the description leaves that open, if that is
            known
        micro_batches: elements of a step
    """

    def whole(spec: Any) -> Any:
        shape = spec.shape.as_list() if isinstance(spec, tf.TensorSpec) else [None]
        shape = [rows, *shape[1:]] if shape[:1] == [None] else shape
        if None in shape or not isinstance(spec, tf.TensorSpec) or spec.dtype == tf.string:
            raise ValueError
        return tf.TensorSpec(shape, spec.dtype)

    try:
        spec = tf.nest.map_structure(whole, element_spec)
    except ValueError:  # as_list does so, too, where the rank is open
        return None
    each = sum(s.dtype.size * math.prod(s.shape.as_list()) for s in tf.nest.flatten(spec))
    steps = STACK_BYTES // max(each * micro_batches, 1)
    return Stack(spec, max(1, min(steps, STACK_STEPS)))
