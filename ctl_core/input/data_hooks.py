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
            that was passed to it. A new dataset must be endless, so it has no passes
    """

    dataset: tf.data.Dataset
    hook: Hook
    reader: Reader | None
    is_stream: bool


class DataHooks:
    """Calls the data hooks with the batch sizes of a run."""

    def __init__(self, hooks: Hooks, seed: int, batch: int, replicas: int) -> None:
        """Stores the hooks and their arguments.

        Args:
            hooks: the hooks of the run
            seed: the seed of Python, NumPy, TensorFlow and Keras, which is set before each call
            batch: the global batch size
            replicas: the number of replicas in all processes
        """
        self._hooks = hooks
        self._seed = seed
        self._batch = batch
        self._replicas = replicas

    def call(self, per_replica_batch_size: int, reader: Reader | None = None) -> HookedData:
        """Calls ``create_dataset`` and ``make_batches``.

        Args:
            per_replica_batch_size: the argument of this name that is passed to the hooks
            reader: the reader that an earlier call returned. It is used again if ``create_dataset``
                returns the same object again

        Raises:
            SetupError: a hook returned neither a dataset nor a reader.
        """
        create_dataset = self._hooks.create_dataset
        make_batches = self._hooks.make_batches
        arguments = {
            "per_replica_batch_size": per_replica_batch_size,
            "global_batch_size": self._batch,
            "input_context": tf.distribute.InputContext(1, 0, self._replicas),
        }
        keras.utils.set_random_seed(self._seed)
        create_again = functools.partial(create_dataset, **arguments)
        created = create_dataset(**arguments)
        reader = open_reader(create_dataset, created, create_again, reader)
        if reader is None:
            dataset = created
            repeated = created
        else:
            dataset = reader.read(goes_on=False)
            repeated = reader.read(goes_on=True)
        if repeated.cardinality() != tf.data.INFINITE_CARDINALITY:
            repeated = repeated.repeat()
        returned = make_batches(dataset=repeated, **arguments)
        refuse_unfinished_caches(create_dataset, returned)
        warn_of_old_caches(create_dataset, returned)
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
