"""Compiled stretches: many steps as one XLA executable, on batches that are drawn before.

For one replica in one process: the sum over several has to leave the executable. Batches are
stacked outside of it: small ones by tf.data, in units (prefetch.py), others as they are drawn, one
by one. The position in the data is that of the last step whatever the length of a stretch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl_core.compat import GraphWriter
from ctl_core.input.batches import Share
from ctl_core.input.prefetch import StackedBatches
from ctl_core.input.stream import Input
from ctl_core.model.parts import Parts
from ctl_core.numerics.not_finite import nothing, of_step, then
from ctl_core.step import StepResult, refuse_summaries, train_step

# What of a step is carried through a loop; all else is returned of one that is not part of it.
LOSS = frozenset({"loss"})
# A stack holds at most so many bytes, and so many steps: more gain nothing.
STACK_BYTES, STACK_STEPS = 2**26, 100


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """The batch of one step out of a stack, in place of the input."""

    stacked: Any
    index: tf.Tensor
    examples: int
    accumulate_steps: int

    def draw(self) -> tuple[Callable[[Any], Any], int]:
        """Deals out micro-batches, as ``Input.draw`` does.

        By gather: the index of a slice would be a constant of the executable, and another one be
        made for each.
        """

        def deal(micro_batch: Any) -> Share:
            position = self.index * self.accumulate_steps + micro_batch
            batch = tf.nest.map_structure(lambda part: tf.gather(part, position), self.stacked)
            return Share(batch)

        return deal, self.examples


def count_stacked_steps(parts: Parts, data: Input) -> int:
    """Returns for how many steps batches are stacked; 0 where steps cannot be in one executable.

    That is where gradients are summed over replicas, or batches are not of one dense shape.
    """
    if not parts.jit_compile or parts.shape.replicas > 1 or data.whole:
        return 0
    if parts.shape.batch % parts.shape.accumulate_steps:
        return 0
    size = 0
    for spec in tf.nest.flatten(data.dataset.element_spec):
        dense = isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string
        if not (dense and spec.shape.is_fully_defined() and spec.shape.rank):
            return 0
        size += spec.dtype.size * math.prod(spec.shape.as_list())
    return max(1, min(STACK_BYTES // max(size, 1), STACK_STEPS))


def train_stretches(
    parts: Parts, data: Input, before: tf.Tensor, steps: tf.Tensor, fetches: frozenset[str]
) -> tuple[dict[str, Any], tf.Tensor]:
    """Takes steps, as many in one executable as a stack holds.

    Args:
        parts: what a step is made of
        data: where batches are drawn from
        before: how many steps were taken
        steps: how many to take; both int64 scalars
        fetches: ``LOSS``, if that of the last step is returned, or nothing

    Returns:
        The loss of the last step by objective, float32 scalars, or nothing; the numbers of
        ``Noted``, an int64 vector.
    """
    no_loss = {name: tf.zeros([]) for name in parts.optimizers if fetches}

    @tf.function(jit_compile=True, autograph=False)
    def stretch(stacked: Any, first: tf.Tensor, before: tf.Tensor, steps: tf.Tensor) -> Any:
        def take_one(done: tf.Tensor, _: Any, noted: Any) -> tuple[Any, ...]:
            step = before + tf.cast(done, tf.int64) + 1
            result = _take_step(parts, stacked, first + done, step, fetches)
            loss = {name: tf.cast(result.loss[name], tf.float32) for name in no_loss}
            return done + 1, loss, then(noted, of_step(result.notes, step))

        start = (tf.constant(0), no_loss, nothing())
        return tf.while_loop(lambda done, *_: done < steps, take_one, start)[1:]

    def take_stretch(done: tf.Tensor, _: Any, noted: tf.Tensor) -> tuple[tf.Tensor, Any, tf.Tensor]:
        stacked, first, number = _draw_stack(parts, data, steps - done)
        loss, own = stretch(stacked, first, before + done, tf.cast(number, tf.int32))
        return done + number, loss, then(noted, own)

    start = (tf.constant(0, tf.int64), no_loss, nothing())
    return tf.while_loop(lambda done, *_: done < steps, take_stretch, start)[1:]  # type: ignore[no-any-return]


def train_one(parts: Parts, data: Input, fetches: frozenset[str], step: tf.Tensor) -> StepResult:
    """Takes a single step, in one executable, and returns what ``train_step`` does."""

    @tf.function(jit_compile=True, autograph=False)
    def one(stacked: Any, step: tf.Tensor) -> dict[str, Any]:
        result = _take_step(parts, stacked, tf.constant(0), step, fetches)
        return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}

    stacked = _split(parts, tf.nest.map_structure(lambda part: part[None], next(data.iterator)))
    return StepResult(**one(stacked, step))


def _take_step(
    parts: Parts, stacked: Any, index: tf.Tensor, step: tf.Tensor, fetches: frozenset[str]
) -> StepResult:
    drawn = _Drawn(stacked, index, parts.shape.batch, parts.shape.accumulate_steps)
    whole = dataclasses.replace(parts, jit_compile=False, in_executable=True)
    with GraphWriter(refuse_summaries).as_default():
        return train_step(whole, drawn, fetches, step)


def _split(parts: Parts, stacked: Any) -> Any:
    """Returns stacked batches [steps, B, ...] as stacked micro-batches [steps A, B / A, ...]."""
    size = parts.shape.batch // parts.shape.accumulate_steps
    return tf.nest.map_structure(lambda t: tf.reshape(t, [-1, size, *t.shape[2:]]), stacked)


def _draw_stack(parts: Parts, data: Input, most: tf.Tensor) -> tuple[Any, tf.Tensor, tf.Tensor]:
    """Draws batches of the next steps, ``most`` at most; an int64 scalar.

    Returns:
        The batches, stacked; the index of the first to use, an int32 scalar; for how many steps
        they are, an int64 scalar.
    """
    if isinstance(data.iterator, StackedBatches):
        unit, first, number = data.iterator.take(most)
        return _split(parts, unit), tf.cast(first, tf.int32), number
    limit = count_stacked_steps(parts, data)
    number = tf.minimum(most, limit)
    specs = tf.nest.flatten(data.dataset.element_spec)
    arrays = [tf.TensorArray(s.dtype, limit, element_shape=s.shape) for s in specs]

    def draw_one(done: tf.Tensor, arrays: Any) -> tuple[tf.Tensor, Any]:
        drawn = tf.nest.flatten(next(data.iterator))
        return done + 1, [a.write(done, part) for a, part in zip(arrays, drawn, strict=True)]

    count = tf.cast(number, tf.int32)
    _, arrays = tf.while_loop(lambda done, _: done < count, draw_one, (tf.constant(0), arrays))
    stacked = [  # its size is always the same
        tf.ensure_shape(array.stack(), [limit, *spec.shape])
        for array, spec in zip(arrays, specs, strict=True)
    ]
    stacked = tf.nest.pack_sequence_as(data.dataset.element_spec, stacked)
    return _split(parts, stacked), tf.constant(0), number
