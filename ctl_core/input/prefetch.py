"""Reads ahead: prepares elements while others are used, and reads many batches at once."""

import math

import tensorflow as tf

from ctl_core.compat import is_tuned
from ctl_core.types import Batch, Structure

# Every checkpoint holds a unit, and the units that were read ahead.
UNIT_BYTES = 2**22
# More batches in a unit are not faster.
_MAX_BATCHES = 100
# Fewer batches in a unit are not faster than batches one by one: measured with batches of 2.4 MB.
_MIN_BATCHES = 4


def read_ahead(
    dataset: tf.data.Dataset, for_long: bool, number: int = tf.data.AUTOTUNE
) -> tf.data.Dataset:
    """Returns the dataset, which prepares elements while others are used.

    A prefetch tunes itself. Other stages are tuned by a thread. When an iterator is deleted on a
    busy machine, Python may wait up to a minute for that thread to end (TensorFlow 2.21 wakes it
    before it can see that it should end). So parallel stages are tuned only if that pays.

    Args:
        dataset: the dataset to read
        for_long: whether it is read for long; otherwise each parallel stage makes one call for each
            core
        number: the number of elements that are read ahead
    """
    is_worth_tuning = for_long and is_tuned(dataset)
    if not is_worth_tuning and dataset.options().autotune.enabled is None:
        options = tf.data.Options()
        options.autotune.enabled = False
        dataset = dataset.with_options(options)
    return dataset.prefetch(number)


class StackedBatches(tf.Module):  # type: ignore[misc]
    """Reads units, each of many batches, and returns their batches one after the other.

    An executable of many steps takes its batches stacked: to draw a single batch would take longer
    than the step of a small model. A checkpoint in the middle of a unit holds the unit, the number
    of its batches that were drawn, and the position of ``stream``, which reads units.
    """

    def __init__(self, dataset: tf.data.Dataset, number: int) -> None:
        """Starts reading.

        Args:
            dataset: an endless dataset of dense batches that have the same shape
            number: the number of batches in a unit
        """
        super().__init__()
        self._number = number
        stacked = dataset.batch(number, drop_remainder=True)
        self.stream = iter(read_ahead(stacked, for_long=True, number=2))
        with tf.device("CPU:0"):
            self._unit = [
                tf.Variable(tf.zeros(spec.shape, spec.dtype), trainable=False)
                for spec in tf.nest.flatten(stacked.element_spec)
            ]
            self._drawn = tf.Variable(number, dtype=tf.int32, trainable=False, name="drawn")

    def __next__(self) -> Batch:
        """Returns the next batch."""
        unit, first, _ = self.take(tf.constant(1))
        return tf.nest.map_structure(lambda stacked: stacked[first], unit)

    def take(self, limit: tf.Tensor) -> tuple[Structure, tf.Tensor, tf.Tensor]:
        """Draws batches: as many as the unit has left, or ``limit``, an int32 scalar, if fewer.

        Returns:
            The stacked batches of the unit, the index of the first batch that is drawn, and the
            number of batches that are drawn.
        """
        first = tf.cond(self._drawn < self._number, self._drawn.read_value, self._read)
        number = tf.minimum(limit, self._number - first)
        self._drawn.assign(first + number)
        tensors = [tf.identity(variable) for variable in self._unit]
        return tf.nest.pack_sequence_as(self.stream.element_spec, tensors), first, number

    def _read(self) -> tf.Tensor:
        tensors = tf.nest.flatten(next(self.stream))
        for variable, tensor in zip(self._unit, tensors, strict=True):
            variable.assign(tensor)
        return tf.constant(0)


def count_batches(dataset: tf.data.Dataset) -> int:
    """Returns the number of batches in a unit, or 0 if batches are so large that no unit pays."""
    specs = tf.nest.flatten(dataset.element_spec)
    size = sum(spec.dtype.size * math.prod(spec.shape.as_list()) for spec in specs)
    number = min(_MAX_BATCHES, UNIT_BYTES // max(size, 1))
    if number < _MIN_BATCHES:
        return 0
    return number
