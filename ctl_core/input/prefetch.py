"""Reading ahead: elements while others are used, and batches many at once."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from ctl_core.compat import is_tuned

# A unit stands in every checkpoint, and so do those that are read ahead.
UNIT_BYTES = 2**20
_AHEAD = 2
_MOST = 100  # steps: more in one executable gain nothing
_FEW = 10  # steps: where a unit is for fewer, drawing batches is not what takes the time


def read_ahead(
    dataset: tf.data.Dataset, for_long: bool, number: int = tf.data.AUTOTUNE
) -> tf.data.Dataset:
    """Prepares elements while others are used; without the tuner where that has nothing to do.

    A prefetch tunes itself. What tunes the other stages is a thread, for which the iterator's end
    waits, with Python standing still: where the cores are busy, in one case of four for as long as
    the iterator has been there, up to a minute. (Seen in TensorFlow 2.21: the thread is woken
    before it can see that it is to end, and waits again.)

    Args:
        dataset: what is read
        for_long: whether it pays to tune parallel stages; if not, they take a number of calls that
            is fixed, that of the cores
        number: of elements; default: as many as the prefetch finds right
    """
    tunes = for_long and is_tuned(dataset)
    if not tunes and dataset.options().autotune.enabled is None:
        options = tf.data.Options()
        options.autotune.enabled = False
        dataset = dataset.with_options(options)
    return dataset.prefetch(number)


class StackedBatches(tf.Module):  # type: ignore[misc]
    """An iterator that reads many batches at once, a unit, which is used up batch by batch.

    An executable of many steps takes its batches stacked: drawn one by one, each would cost a small
    model more than its step. A checkpoint may fall in the middle of a unit: it holds the unit and
    how much of it is used, beside the position of what reads units.
    """

    def __init__(self, dataset: tf.data.Dataset, number: int) -> None:
        """Begins to read.

        Args:
            dataset: of dense batches of one shape, without an end
            number: of batches in a unit
        """
        super().__init__()
        self._number = number
        spec = dataset.element_spec
        self._spec = lambda: spec  # unseen: tf.Module would track a dict or a list
        stacked = dataset.batch(number, drop_remainder=True)
        self._iterator = iter(read_ahead(stacked, for_long=True, number=_AHEAD))
        with tf.device("CPU:0"):
            self._unit = [
                tf.Variable(tf.zeros([number, *part.shape], part.dtype), trainable=False)
                for part in tf.nest.flatten(spec)
            ]
            self._drawn = tf.Variable(number, dtype=tf.int32, trainable=False, name="drawn")

    def __next__(self) -> Any:
        """Returns the next batch."""
        unit, first, _ = self.take(tf.constant(1))
        return tf.nest.map_structure(lambda stacked: stacked[first], unit)

    def take(self, limit: tf.Tensor) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """Draws batches: as many as the unit has left, or those asked for, if they are fewer.

        Args:
            limit: how many at most, an int32 scalar

        Returns:
            The unit, stacked; the index of the first that is drawn; how many are.
        """
        tf.cond(self._drawn < self._number, lambda: tf.constant(0), self._read)
        first = self._drawn.read_value()
        number = tf.minimum(limit, self._number - first)
        self._drawn.assign_add(number)
        parts = [tf.identity(variable) for variable in self._unit]
        return tf.nest.pack_sequence_as(self._spec(), parts), first, number

    def _read(self) -> tf.Tensor:
        for variable, part in zip(self._unit, tf.nest.flatten(next(self._iterator)), strict=True):
            variable.assign(part)
        self._drawn.assign(0)
        return tf.constant(0)


def count_batches(dataset: tf.data.Dataset) -> int:
    """Returns how many batches a unit has; 0 where units do not pay.

    They do not where batches are so large that drawing them costs next to nothing.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    size = sum(spec.dtype.size * math.prod(spec.shape.as_list()) for spec in specs)
    number = min(_MOST, UNIT_BYTES // max(size, 1))
    return number if number >= _FEW else 0
