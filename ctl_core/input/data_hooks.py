"""Calls the hooks of the training data: ``create_dataset`` and then ``make_batches``.

Iterators of one dataset share the state of its shuffles. So the dataset that is trained on is never
read for another purpose: an inspection reads a second one, which the same hooks create from the
same seed.
"""

import dataclasses
import functools

import keras
import tensorflow as tf

from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.input.caches import refuse_unfinished_caches
from ctl_core.input.readers import Reader, open_reader
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.types import Batch


@dataclasses.dataclass(frozen=True)
class HookedData:
    """The dataset that a call of the data hooks returned.

    Attributes:
        dataset: the dataset whose elements are used
        hook: the hook that returned it, for messages
        reader: reads the object of ``create_dataset``; None for a tf.data.Dataset
        is_stream: whether ``make_batches`` returned another dataset than the repeated one that it
            was given; that one has no passes, because it has to be endless
    """

    dataset: tf.data.Dataset
    hook: Hook
    reader: Reader | None
    is_stream: bool


class DataHooks:
    """Calls the data hooks with the sizes of a run."""

    def __init__(self, hooks: Hooks, seed: int, batch: int, replicas: int) -> None:
        """Stores the arguments of the hooks.

        Args:
            hooks: the hooks of the run
            seed: seeds Python, NumPy, TensorFlow and Keras before each call
            batch: the global batch size
            replicas: the number of replicas in all processes
        """
        self._hooks = hooks
        self._seed = seed
        self._batch = batch
        self._replicas = replicas

    def call(self, per_replica_batch_size: int, reader: Reader | None = None) -> HookedData:
        """Calls the hooks.

        Args:
            per_replica_batch_size: an argument of the hooks
            reader: the reader of an earlier call, which is used again if ``create_dataset`` returns
                the same object again

        Raises:
            SetupError: a hook returned something else than a dataset or a reader.
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
        if returned is repeated:
            return HookedData(dataset, create_dataset, reader, is_stream=False)
        return HookedData(returned, make_batches, reader, is_stream=True)

    def read_first(self, data: HookedData, per_replica_batch_size: int) -> Batch | None:
        """Returns the first element of the data, or None if there is no element.

        ``data`` stays unread: unless its reader knows the element already, the hooks are called
        again.
        """
        if data.reader is not None and not data.is_stream:
            return tf.nest.map_structure(tf.constant, data.reader.first_element)
        with keep_seeds():
            dataset = self.call(per_replica_batch_size, data.reader).dataset
            return next(iter(dataset.take(1)), None)
