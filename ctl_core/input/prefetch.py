"""Reading ahead: elements while others are used, and batches many at once."""

import math
from typing import Any

import tensorflow as tf

from ctl_core.compat import is_tuned

# A unit stands in every checkpoint, and so do those that are read ahead.
UNIT_BYTES = 2**22
_MOST = 100  # steps: more in one executable gain nothing
_FEW = 4  # steps: batches of 2.4 MB gained nothing from units of 3, 6 or 27


def read_ahead(
    dataset: tf.data.Dataset, for_long: bool, number: int = tf.data.AUTOTUNE
) -> tf.data.Dataset:
    """Prepares elements while others are used; without the tuner where that has nothing to do.

    A prefetch tunes itself. What tunes other stages is a thread, for which the iterator's end waits
    where the cores are busy, with Python standing still, up to a minute (TensorFlow 2.21: the
    thread is woken before it can see that it is to end, and waits again). So parallel stages are
    tuned only if the dataset is read ``for_long``; otherwise they take one call for each core.
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
    model more than its step. A checkpoint in the middle of a unit holds the unit and how much of it
    is used, beside the position of ``source``, which reads units.
    """

    def __init__(self, dataset: tf.data.Dataset, number: int) -> None:
        """Begins to read units of so many batches; these are dense, of one shape, without end."""
        super().__init__()
        self._number = number
        stacked = dataset.batch(number, drop_remainder=True)
        self.source = iter(read_ahead(stacked, for_long=True, number=2))
        with tf.device("CPU:0"):
            self._unit = [
                tf.Variable(tf.zeros(part.shape, part.dtype), trainable=False)
                for part in tf.nest.flatten(stacked.element_spec)
            ]
            self._drawn = tf.Variable(number, dtype=tf.int32, trainable=False, name="drawn")

    def __next__(self) -> Any:
        """Returns the next batch."""
        unit, first, _ = self.take(tf.constant(1))
        return tf.nest.map_structure(lambda stacked: stacked[first], unit)

    def take(self, limit: tf.Tensor) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """Draws batches: as many as the unit has left, or ``limit``, an int32 scalar, if fewer.

        Returns:
            The unit, stacked; the index of the first that is drawn; how many are.
        """
        first = tf.cond(self._drawn < self._number, self._drawn.read_value, self._read)
        number = tf.minimum(limit, self._number - first)
        self._drawn.assign(first + number)
        parts = [tf.identity(variable) for variable in self._unit]
        return tf.nest.pack_sequence_as(self.source.element_spec, parts), first, number

    def _read(self) -> tf.Tensor:
        for variable, part in zip(self._unit, tf.nest.flatten(next(self.source)), strict=True):
            variable.assign(part)
        return tf.constant(0)


def count_batches(dataset: tf.data.Dataset) -> int:
    """Returns how many batches a unit has; 0 where they are so large that none pays."""
    specs = tf.nest.flatten(dataset.element_spec)
    size = sum(spec.dtype.size * math.prod(spec.shape.as_list()) for spec in specs)
    number = min(_MOST, UNIT_BYTES // max(size, 1))
    return number if number >= _FEW else 0
