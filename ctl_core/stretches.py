"""Compiled stretches: many steps as one XLA executable, on elements that are drawn before.

For one replica in one process; the sum over several has to leave the executable. Elements are
stacked outside of it: small ones by tf.data, in units (units.py), others as they are drawn, one by
one. The position in the data is that of the last step whatever the length of a stretch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.checks.returned import assert_weights
from ctl_core.compat import GraphWriter
from ctl_core.compiled import Stack, no_summaries, stack_of
from ctl_core.context import StepContext
from ctl_core.inputs import Input
from ctl_core.numerics.not_finite import nothing, of_step, then
from ctl_core.step import train_step
from ctl_core.units import Units

# What of a step is carried through a loop; all else is returned of one that is not part of it.
LOSS = frozenset({"loss"})


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """The elements of one step, in place of the input."""

    strategy: tf.distribute.Strategy
    elements: Any
    first: tf.Tensor

    def next_batch(self, watch: bool, index: tf.Tensor | int = 0) -> Any:
        """Returns the micro-batch of this index.

        By gather: the index of a slice would be a constant of the executable, and another one be
        made for each.
        """
        position = self.first + index
        return tf.nest.map_structure(lambda stacked: tf.gather(stacked, position), self.elements)


def stack_for(context: StepContext, data: Input) -> Stack | None:
    """Returns how elements are stacked; None where steps cannot be part of one executable.

    That is where gradients are summed over replicas, elements are not of one shape, or the last
    batch of a pass is kept.
    """
    if context.replicas > 1 or data.counted is not None:
        return None
    return stack_of(data.element_spec, data.rows, context.accumulate_steps)


def train_stretches(
    context: StepContext,
    data: Input,
    before: tf.Tensor,
    steps: tf.Tensor,
    with_loss: bool = False,
) -> tuple[dict[str, Any], tf.Tensor]:
    """Takes steps, as many in one executable as a stack holds.

    Args:
        context: what a step is made of
        data: where elements are drawn from
        before: how many steps were taken
        steps: how many to take; both int64 scalars
        with_loss: whether the loss of the last one is returned; traced without before

    Returns:
        What ``train_step`` does for the last step; the numbers of ``Noted``, an int64 vector.
    """
    stack = context.stack
    assert stack is not None

    @tf.function(jit_compile=True, autograph=False)
    def stretch(elements: Any, first: tf.Tensor, before: tf.Tensor, steps: tf.Tensor) -> Any:
        def body(done: tf.Tensor, _: Any, noted: Any, weights: Any) -> tuple[Any, ...]:
            step = before + tf.cast(done, tf.int64) + 1
            drawn = _Drawn(data.strategy, elements, first + done * context.accumulate_steps)
            found, own = _step(context, drawn, LOSS, step)
            noted = then(noted, of_step(found.get("noted", []), step))
            context.loss_spec = tf.nest.map_structure(tf.type_spec_from_value, found["loss"])
            values = {"loss": found["loss"]} if with_loss else {}
            return done + 1, values, noted, _worse(weights, step, own)

        start = (tf.constant(0), nothing_found(), nothing(), _WELL)
        return tf.while_loop(lambda done, *_: done < steps, body, start)[1:]

    def nothing_found() -> dict[str, Any]:
        of_loss = {"loss": context.loss_spec} if with_loss else {}
        return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), of_loss)  # type: ignore[no-any-return]

    def body(done: tf.Tensor, _: Any, noted: tf.Tensor) -> tuple[tf.Tensor, Any, tf.Tensor]:
        elements, first, number = _elements(context, data, stack, steps - done, with_loss)
        found, own, weights = stretch(elements, first, before + done, tf.cast(number, tf.int32))
        with tf.control_dependencies([assert_weights(*weights)]):
            return done + number, found, then(noted, own)

    start = (tf.constant(0, tf.int64), nothing_found(), nothing())
    return tf.while_loop(lambda done, *_: done < steps, body, start)[1:]  # type: ignore[no-any-return]


def train_one(
    context: StepContext,
    data: Input,
    fetches: frozenset[str],
    watch: bool,
    step: tf.Tensor,
) -> dict[str, Any]:
    """Takes a single step, in one executable, and returns what ``train_step`` does."""
    stack = context.stack
    assert stack is not None

    @tf.function(jit_compile=True, autograph=False)
    def one(elements: Any, step: tf.Tensor) -> tuple[dict[str, Any], Any]:
        drawn = _Drawn(data.strategy, elements, tf.constant(0))
        found, weights = _step(context, drawn, fetches, step)
        return found, _worse(_WELL, step, weights)

    def together(spec: tf.TensorSpec, *parts: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.stack(parts), [len(parts), *spec.shape])

    elements = [data.next_batch(watch) for _ in range(context.accumulate_steps)]
    found, weights = one(tf.nest.map_structure(together, stack.spec, *elements), step)
    with tf.control_dependencies([assert_weights(*weights)]):
        return tf.nest.map_structure(tf.identity, found)  # type: ignore[no-any-return]


def _step(
    context: StepContext, drawn: _Drawn, fetches: frozenset[str], step: tf.Tensor
) -> tuple[dict[str, Any], list[tf.Tensor]]:
    """Takes a step; returns what ``train_step`` does, and the weights of its updates."""
    context.weights.clear()
    with GraphWriter(no_summaries).as_default(), context.taking_step(step):
        found = train_step(context, drawn, fetches, step=step)
    return found, list(context.weights)


def _elements(
    context: StepContext, data: Input, stack: Stack, most: tf.Tensor, watch: bool
) -> tuple[Any, tf.Tensor, tf.Tensor]:
    """Draws elements of the next steps, ``most`` at most; an int64 scalar.

    Returns:
        The elements, stacked; the index of the first to use, an int32 scalar; for how many steps
        they are, an int64 scalar.
    """
    if isinstance(data.iterator, Units):
        limit = most * context.accumulate_steps
        unit, first, number = data.timed(watch, lambda: data.iterator.take(limit))
        if data.tally.variable is not None and watch:
            data.tally.variable.assign(unit[1][first + number - 1])
        return data.untagged(unit), tf.cast(first, tf.int32), number // context.accumulate_steps
    number = tf.minimum(most, stack.steps)
    count = tf.cast(number, tf.int32) * context.accumulate_steps
    return _draw(context, data, stack, count, watch), tf.constant(0), number


def _draw(context: StepContext, data: Input, stack: Stack, count: tf.Tensor, watch: bool) -> Any:
    """Draws so many elements and stacks them; the stack's size is always the same."""
    specs = tf.nest.flatten(stack.spec)
    number = stack.steps * context.accumulate_steps
    arrays = [tf.TensorArray(s.dtype, number, element_shape=s.shape) for s in specs]

    def body(done: tf.Tensor, arrays: Any) -> tuple[tf.Tensor, Any]:
        parts = tf.nest.flatten(data.next_batch(watch))
        return done + 1, [
            array.write(done, part) for array, part in zip(arrays, parts, strict=True)
        ]

    _, arrays = tf.while_loop(lambda done, _: done < count, body, (tf.constant(0), arrays))
    stacked = [
        tf.ensure_shape(array.stack(), [number, *spec.shape])
        for array, spec in zip(arrays, specs, strict=True)
    ]
    return tf.nest.pack_sequence_as(stack.spec, stacked)


# The first step whose weights are wrong, and these; or such as are right.
_WELL = (np.int64(0), np.ones(2, np.float32))


def _worse(before: Any, step: tf.Tensor, weights: list[tf.Tensor]) -> Any:
    """Returns the step and the weights that are wrong first."""
    for one in weights:
        bad = tf.logical_and(before[1][1] > 0, tf.logical_not(one[1] > 0))
        before = tf.where(bad, step, before[0]), tf.where(bad, one, before[1])
    return tuple(map(tf.convert_to_tensor, before))
