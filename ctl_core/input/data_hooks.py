"""Calls the hooks that create the training data: ``create_dataset``, then ``make_batches``.

All iterators of a dataset share the state of its shuffle stages. Therefore, the training dataset is
never read for any other purpose. To inspect the data, the engine calls the same hooks again with
the same seed, and reads this second dataset.
"""

import dataclasses
import functools

import keras
import tensorflow as tf

from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.input.caches import refuse_unfinished_caches, warn_of_old_caches
from ctl_core.input.own_rows import Mark, RowSelection, find_mark
from ctl_core.input.readers import Reader, open_reader
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.types import Batch


@dataclasses.dataclass(frozen=True)
class HookedData:
    """The results of one call of the data hooks.

    Attributes:
        dataset: the dataset to read: that of ``make_batches`` if ``is_stream`` is True, otherwise
            that of ``create_dataset``
        hook: the hook that returned ``dataset``; error messages name this hook
        reader: the reader of the object that ``create_dataset`` returned; None if the object is a
            tf.data.Dataset
        is_stream: whether ``make_batches`` returned a new dataset rather than the repeated dataset
            that was passed to it. A new dataset must be endless, so it has no passes. False if
            there is a mark, which knows the passes
        mark: the call of ``ctl.data.own_rows`` from which ``dataset`` is read; None if there is
            none. With a mark, ``dataset`` is endless
    """

    dataset: tf.data.Dataset
    hook: Hook
    reader: Reader | None
    is_stream: bool
    mark: Mark | None = None


class DataHooks:
    """Calls the data hooks with the batch sizes of a run."""

    def __init__(self, hooks: Hooks, seed: int, replicas: int, selection: RowSelection) -> None:
        """Stores the hooks and their arguments.

        Args:
            hooks: the hooks of the run
            seed: the seed of Python, NumPy, TensorFlow and Keras, which is set before each call
            replicas: the number of replicas in all processes
            selection: selects the rows of this process after ``ctl.data.own_rows``
        """
        self.selection = selection
        self._hooks = hooks
        self._seed = seed
        self._replicas = replicas

    def call(
        self,
        per_replica_batch_size: int,
        reader: Reader | None = None,
        selection: RowSelection | None = None,
    ) -> HookedData:
        """Calls ``create_dataset`` and ``make_batches``.

        Args:
            per_replica_batch_size: the argument of this name that is passed to the hooks
            reader: the reader that an earlier call returned. It is used again if ``create_dataset``
                returns the same object again
            selection: selects rows after ``ctl.data.own_rows``; default: all rows, to inspect them

        Raises:
            SetupError: a hook returned neither a dataset nor a reader, or a pipeline in which
                ``ctl.data.own_rows`` cannot be.
        """
        selection = selection or self.selection.select_all()
        with selection.note_marks() as marks:
            return self._call_marked(per_replica_batch_size, reader, marks)

    def _call_marked(
        self, per_replica_batch_size: int, reader: Reader | None, marks: list[Mark]
    ) -> HookedData:
        """Calls the hooks; calls of ``ctl.data.own_rows`` add to ``marks``."""
        create_dataset = self._hooks.create_dataset
        make_batches = self._hooks.make_batches
        arguments = {
            "per_replica_batch_size": per_replica_batch_size,
            "global_batch_size": self.selection.batch,
            "input_context": tf.distribute.InputContext(1, 0, self._replicas),
        }
        keras.utils.set_random_seed(self._seed)
        create_again = functools.partial(create_dataset, **arguments)
        created = create_dataset(**arguments)
        reader = open_reader(create_dataset, created, create_again, reader)
        mark = None
        if reader is None:
            dataset = created
            repeated = created
            mark = find_mark(create_dataset, created, marks)
        else:
            dataset = reader.read(goes_on=False)
            repeated = reader.read(goes_on=True)
        if mark is None and repeated.cardinality() != tf.data.INFINITE_CARDINALITY:
            repeated = repeated.repeat()
        returned = make_batches(dataset=repeated, **arguments)
        refuse_unfinished_caches(create_dataset, returned)
        warn_of_old_caches(create_dataset, returned)
        if returned is not repeated:
            mark = find_mark(make_batches, returned, marks)
        if mark is not None:
            return HookedData(returned, create_dataset, None, is_stream=False, mark=mark)
        if returned is repeated:
            return HookedData(dataset, create_dataset, reader, is_stream=False)
        return HookedData(returned, make_batches, reader, is_stream=True)

    def read_first(self, data: HookedData, per_replica_batch_size: int) -> Batch | None:
        """Returns the first element of the data, or None if there is no element.

        This method does not read ``data.dataset``. If the reader has stored the first element, that
        element is returned. Otherwise, the method calls the hooks again, and reads the new dataset.
        """
        if data.reader is not None and not data.is_stream:
            return tf.nest.map_structure(tf.constant, data.reader.first_element)
        with keep_seeds():
            dataset = self.call(per_replica_batch_size, data.reader).dataset
            return next(iter(dataset.take(1)), None)
