"""Prefetches elements while training uses earlier ones, and reads many batches at once."""

import atexit
import functools
import gc
import math
import signal

import tensorflow as tf

from ctl_core.compat import forget_custom_gradients, is_tuned
from ctl_core.types import Batch, Structure

# The maximum size (bytes) of a unit, which is a group of batches that are read at once. Units must
# be small, because every checkpoint contains the current unit and the prefetched units.
UNIT_BYTES = 2**22
# The maximum number of batches in a unit. Larger units are not faster.
_MAX_BATCHES = 100
# The minimum number of batches in a unit. Smaller units are not faster than reading the batches one
# by one, according to measurements with batches of 2.4 MB.
_MIN_BATCHES = 4


def read_ahead(
    dataset: tf.data.Dataset, for_long: bool, number: int = tf.data.AUTOTUNE
) -> tf.data.Dataset:
    """Adds prefetching to a dataset, so that elements are prepared while earlier ones are used.

    A prefetch stage tunes its own buffer size. A thread of tf.data (autotune) tunes the parallelism
    of the other stages. When an iterator is deleted on a busy machine, Python may wait up to a
    minute for this thread to end, because TensorFlow 2.21 wakes the thread before the thread can
    see that it should end. Therefore, autotune is disabled unless the dataset is read for a long
    time and has a stage to tune. If the user has enabled or disabled autotune for the dataset, that
    choice is kept.

    Args:
        dataset: the dataset to read
        for_long: whether the dataset is read for a long time. Otherwise, autotune is disabled, and
            a parallel stage makes as many parallel calls as there are CPU cores
        number: the number of elements to prefetch
    """
    end_reading_at_exit()
    is_worth_tuning = for_long and is_tuned(dataset)
    if not is_worth_tuning and dataset.options().autotune.enabled is None:
        options = tf.data.Options()
        options.autotune.enabled = False
        dataset = dataset.with_options(options)
    return dataset.prefetch(number)


@functools.cache
def end_reading_at_exit() -> None:
    """Makes the process end all reading before Python shuts down.

    Iterators that nothing uses any more may still be prefetching, because a traced graph refers to
    the iterator that it reads from, and only the garbage collector deletes the graph. If Python
    deleted them during its shutdown, the process might never end: the deletion waits for the thread
    that prefetches, and that thread waits for a Python function of the dataset, which cannot run
    any more.
    """
    atexit.register(_end_reading)


def _end_reading() -> None:
    """Deletes the iterators that nothing uses any more, and waits until their threads have ended.

    A Python function of a dataset may take long, for example because it waits for a message, so
    SIGINT ends the process meanwhile.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    forget_custom_gradients()
    gc.collect()
    if handler is not None:  # it is None if the program has installed a handler of its own in C
        signal.signal(signal.SIGINT, handler)


class StackedBatches(tf.Module):
    """Reads units, each a stack of many batches, and returns the batches in order.

    An executable that takes many steps needs stacked batches, because drawing a single batch takes
    longer than one step of a small model. A checkpoint that is saved in the middle of a unit
    contains the unit, the number of batches drawn from it, and the position of ``stream``, the
    iterator over the units.
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
        """Draws at most ``limit`` batches, and no more than the current unit has left.

        If all batches of the current unit have been drawn, the next unit is read first.

        Args:
            limit: the maximum number of batches to draw, an int32 scalar

        Returns:
            The stacked batches of the unit, the index of the first batch drawn, and the number of
            batches drawn.
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
    """Returns the number of batches in a unit, or 0 if batches should be read one by one.

    Units of large batches would contain too few batches to make reading faster.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    size: int = sum(spec.dtype.size * math.prod(spec.shape.as_list()) for spec in specs)
    number = min(_MAX_BATCHES, UNIT_BYTES // max(size, 1))
    if number < _MIN_BATCHES:
        return 0
    return number
