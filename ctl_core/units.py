"""Elements read many at once: a unit is stacked by tf.data, and used up element by element.

An executable of many steps takes its elements stacked. Drawn one by one, each costs a small model
more than its step does; stacked by tf.data, they are made while the executable before runs. A
checkpoint may fall in the middle of a unit: it holds the unit and how much of it is used, beside
the position of what reads units.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from ctl_core.ahead import read_ahead, without_tuner
from ctl_core.compiled import stack_of
from ctl_core.passes import on_host

# A unit stands in every checkpoint, and so do those that are read ahead.
UNIT_BYTES = 2**20
_AHEAD = 2
_FEW = 10  # steps: where a unit is for fewer, drawing elements is not what takes the time


class Units(tf.Module):  # type: ignore[misc]
    """An iterator that reads many elements at once.

    A checkpoint of it holds its exact position: how many of its last unit were drawn, too.

    Attributes:
        number: of elements in a unit
    """

    def __init__(self, dataset: tf.data.Dataset, spec: Any, number: int) -> None:
        """Begins to read.

        Args:
            dataset: without an end
            spec: of its elements, dense and with all their sizes
            number: of elements in a unit
        """
        super().__init__()
        self.number = number
        self._spec = lambda: spec  # unseen: tf.Module would track a dict or a list
        stacked = dataset.batch(number, drop_remainder=True)
        self._iterator = iter(without_tuner(stacked, for_long=True).prefetch(_AHEAD))
        with tf.device("CPU:0"):
            self._unit = [
                tf.Variable(tf.zeros([number, *part.shape], part.dtype), trainable=False)
                for part in tf.nest.flatten(spec)
            ]
        self._drawn = on_host(number, "drawn")

    def __iter__(self) -> Units:
        return self

    def __next__(self) -> Any:
        """Returns the next element."""
        unit, first, _ = self.take(tf.constant(1, tf.int64))
        return tf.nest.map_structure(lambda stacked: stacked[first], unit)

    def take(self, limit: tf.Tensor) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """Draws elements: as many as the unit has left, or those asked for, if they are fewer.

        Args:
            limit: how many at most, an int64 scalar

        Returns:
            The unit, stacked; the index of the first that is drawn; how many are.
        """
        tf.cond(self._drawn < self.number, lambda: tf.constant(0), self._read)
        first = self._drawn.read_value()
        number = tf.minimum(limit, self.number - first)
        self._drawn.assign_add(number)
        parts = [tf.identity(variable) for variable in self._unit]
        return tf.nest.pack_sequence_as(self._spec(), parts), first, number

    def _read(self) -> tf.Tensor:
        for variable, part in zip(self._unit, tf.nest.flatten(next(self._iterator)), strict=True):
            variable.assign(part)
        self._drawn.assign(0)
        return tf.constant(0)


def begin(dataset: tf.data.Dataset, rows: int | None, micro_batches: int) -> Any:
    """Begins to read the elements of a dataset without an end: in units, where that pays.

    It does not where elements are so large that drawing them costs next to nothing.

    Args:
        dataset: of what the replicas take
        rows: how many each tensor of an element has where the description leaves that open, if
            that is known
        micro_batches: elements of a step; 0 where many at once are of no use
    """
    stack = stack_of(dataset.element_spec, rows, micro_batches) if micro_batches else None
    if stack is not None:
        parts = tf.nest.flatten(stack.spec)
        step = micro_batches * sum(p.dtype.size * math.prod(p.shape.as_list()) for p in parts)
        steps = min(stack.steps, UNIT_BYTES // max(step, 1))
        if steps >= _FEW:
            return Units(dataset, stack.spec, steps * micro_batches)
    return iter(read_ahead(dataset, for_long=True))
