"""The training data: the dataset of the hooks, as one endless stream of global batches.

Each process reads one plain tf.data iterator, whose position a checkpoint can hold. The shares of
replicas are taken in the graph. How elements become batches and shares is decided in sharing.py;
the hooks are called in data_hooks.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.cluster.collectives import count_local_replicas
from ctl_core.compat import draw_from, get_seed_generator
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.input.batches import (
    BatchShape,
    Share,
    add_to_digest,
    count_rows,
    distribute_shares,
    find_first_replica,
    find_rows,
    take_batch_rows,
)
from ctl_core.input.data_hooks import DataHooks, HookedData
from ctl_core.input.prefetch import StackedBatches, read_ahead
from ctl_core.input.readers import Reader
from ctl_core.input.sharing import (
    choose_sharing,
    explain_contradiction,
    is_contradiction,
    read_count,
)
from ctl_core.numerics.summation_tree import split_leaves
from ctl_core.run.errors import SetupError
from ctl_core.run.settings import Config
from ctl_core.types import Batch, Count

# Deals out the micro-batch of an index: the fields have a value for each replica of this process.
Deal = Callable[[Count], Share]

# Elements that are read again to find out which of them contradicts the first.
_MOST_EXPLAINED = 1000


class Input:
    """The endless stream of global batches of a run.

    Attributes:
        shape: the shape of a global batch
        hook: the hook that returned the dataset, for messages
        is_stream: whether ``make_batches`` returned an endless dataset of its own
        is_endless: whether the data have no passes
        steps_per_epoch: the global batches in a pass, or those of ``overfit_batches``; None if the
            data have no passes, or no setting needs it (``Config.counts_epochs``)
        dataset: the dataset that ``stream`` reads
        stream: the iterator whose position is part of each checkpoint; None before ``begin``
        held: variables with batches that were read and not yet drawn; part of each checkpoint, too
        iterator: the iterator that batches are drawn from; None before ``begin``
        reader: the Python reader that knows the position, if there is one
        share_spec: the specification of the batch of a share
        unit: how many batches are read at once, see prefetch.py; 0: one by one
    """

    def __init__(
        self,
        hooks: Hooks,
        config: Config,
        strategy: tf.distribute.Strategy,
        shape: BatchShape,
    ) -> None:
        """Calls the hooks and inspects their data; ``begin`` starts reading.

        Raises:
            SetupError: the hooks return no dataset, or one that is not batched as it should be.
        """
        self._config = config
        self._strategy = strategy
        self._count_examples = hooks.count_examples
        self._data_hooks = DataHooks(hooks, config.seed, shape.batch, shape.replicas)
        self._second: tf.data.Dataset | None = None
        self._sharing, data = choose_sharing(
            self._data_hooks, hooks, shape, config.keeps_last_batch
        )
        self._reader = data.reader
        element_spec = None
        if not self._sharing.by_rows:
            element_spec = data.dataset.element_spec
        self.shape = dataclasses.replace(
            shape, by_rows=self._sharing.by_rows, element_spec=element_spec
        )
        self.hook: Hook = data.hook
        self.is_stream = data.is_stream
        self.is_endless = (
            data.is_stream or data.dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        )
        self.steps_per_epoch = self._count_steps(data.dataset)
        self.reader, self.dataset = self._make_stream(data)
        spec = self.dataset.element_spec
        self.share_spec = self._sharing.make_share_spec(spec)
        self._fixed_size = self._sharing.find_fixed_size(spec)
        with tf.device("CPU:0"):
            # The examples drawn since they were last asked for, if their number varies.
            self._drawn: tf.Variable | None = None
            if self._fixed_size is None:
                self._drawn = tf.Variable(0, dtype=tf.int64, trainable=False, name="examples")
            # A checksum of the batches drawn, if other processes should draw the same.
            self._digest: tf.Variable | None = None
            if shape.replicas > count_local_replicas(strategy):
                cardinality = data.dataset.cardinality()
                self._digest = tf.Variable(cardinality, trainable=False, name="digest")
        self.unit = 0
        self.iterator: Any = None  # a tf.data.Iterator or StackedBatches
        self.stream: Any = None  # a tf.data.Iterator
        self.held: tuple[tf.Variable, ...] = ()

    def draw(self) -> tuple[Deal, Count]:
        """Draws a global batch, inside a graph function.

        Returns:
            A function that deals out a micro-batch, and the number of examples in the global batch.
        """
        return self.deal_out(self._sharing.draw(self._read))

    def deal_out(self, batch: Batch | None) -> tuple[Deal, Count]:
        """Returns the same for a batch that was drawn; None for shares that are drawn as dealt."""
        first = find_first_replica(self._strategy)
        replicas = range(first, first + count_local_replicas(self._strategy))
        examples = self._fixed_size or count_rows(batch)
        if self._drawn is not None:
            self._drawn.assign_add(tf.cast(examples, tf.int64))

        def deal(micro_batch: Count) -> Share:
            if self.shape.logical_replicas is not None:
                return self._deal_to_logical_replicas(batch, examples)
            shares = self._sharing.take_shares(batch, examples, micro_batch, replicas, self._read)
            return distribute_shares(self._strategy, shares)

        return deal, examples

    def _deal_to_logical_replicas(self, batch: Batch, examples: Count) -> Share:
        """Returns for each device the rows, or the packed elements, of its logical replicas."""
        leaves = self.shape.shares
        rows = leaves
        if self.shape.by_rows:
            rows = examples
        first_device = find_first_replica(self._strategy)
        end_device = first_device + count_local_replicas(self._strategy)
        shares = []
        for device_leaves in split_leaves(leaves, self.shape.replicas)[first_device:end_device]:
            first, size = find_rows(device_leaves, rows, leaves)
            shares.append(Share(take_batch_rows(batch, first, size)))
        return distribute_shares(self._strategy, shares)

    def _read(self) -> Batch:
        element = next(self.iterator)
        if self._digest is not None:
            with tf.device("CPU:0"):
                self._digest.assign(add_to_digest(self._digest, element))
        return element

    @property
    def digest(self) -> int:
        """A checksum, by which processes that have drawn different data almost surely differ."""
        if self._digest is None:
            return 0
        return int(self._digest.numpy())

    def count_new_examples(self, steps: int) -> int:
        """Returns the number of examples in the last ``steps`` steps, all since the last call."""
        examples = steps * self.shape.batch
        if self._drawn is not None:
            examples = int(self._drawn.numpy())
            self._drawn.assign(0)
        if self.reader is not None:
            self.reader.note_used(examples)
        return examples

    def begin(self, unit: int = 0) -> None:
        """Starts reading; ``unit`` batches at once, or one by one if it is 0."""
        self.unit = unit
        if unit:
            self.iterator = StackedBatches(self.dataset, unit)
            self.stream = self.iterator.stream
            self.held = self.iterator.variables
        else:
            self.stream = iter(read_ahead(self.dataset, for_long=True))
            self.iterator = self.stream

    def begin_anew(self, skip: int = 0) -> None:
        """Starts reading the data from their start, and drops ``skip`` examples."""
        with draw_from(get_seed_generator()):
            data = self._data_hooks.call(self._sharing.per_replica_batch_size, self._reader)
            self._reader = data.reader
            self.reader, self.dataset = self._make_stream(data)
        self.begin(self.unit)
        dropped = 0
        while dropped < skip:
            element = next(self.iterator)
            if self.shape.by_rows:
                dropped += int(count_rows(element))
            else:
                dropped += self.shape.per_replica
        if self.reader is not None:
            self.reader.note_used(skip)

    def make_pass(self) -> tf.data.Dataset:
        """Returns a pass of global batches for inspection, or all data if they have no end."""
        dataset = self._look()
        self._second = None  # its data may be large
        return self._sharing.make_batches(dataset, self.is_endless)

    def describe_shortage(self) -> str:
        """Explains, after the name of the hook, that a pass has less than a global batch."""
        counts = (read_count(self._count_examples, element) or 0 for element in self._look())
        examples = sum(counts) or "an empty dataset, no"
        size = f"one global batch of {self.shape.batch}"
        return f"returned {examples} examples, fewer than {size}; lower --batch-size."

    def explain_contradiction(self, error: BaseException) -> str | None:
        """Explains an error of an element that has no rows, unlike the first one.

        Reads the data again up to that element. Returns None for other errors.
        """
        if not is_contradiction(error):
            return None
        self._second = None  # it may have been read
        elements = self._look().take(_MOST_EXPLAINED)
        explanation = explain_contradiction(self._count_examples, elements, self.shape.batch)
        return f"{self.hook}: {explanation}."

    def _look(self) -> tf.data.Dataset:
        """Returns a dataset other than the one that is trained on, for inspection."""
        if self._second is None:
            size = self._sharing.per_replica_batch_size
            self._second = self._data_hooks.call(size, self._reader).dataset
        return self._second

    def _make_stream(self, data: HookedData) -> tuple[Reader | None, tf.data.Dataset]:
        """Returns the endless dataset of batches, and the reader that knows its position."""
        overfit_batches = self._config.overfit_batches
        dataset = data.dataset
        reader: Reader | None = None
        if not data.is_stream and not overfit_batches:
            reader = data.reader
        if reader is not None:
            multiple = self.shape.batch
            if self._config.keeps_last_batch and self.shape.by_rows:
                multiple = 1
            dataset = reader.read(True, self._sharing.count_used, multiple)
        one_pass = self._sharing.make_batches(dataset, self.is_endless)
        stream = one_pass
        if not self.is_endless:
            stream = one_pass.repeat()
        if reader is not None:
            # The rest of the pass that a resumed run is in may have no batch, at which repeat ends.
            stream = one_pass.concatenate(stream)
        if overfit_batches:
            # Kept as they were read first: neither a shuffle nor noise changes them.
            elements = overfit_batches * (self._sharing.elements_per_batch or 1)
            stream = stream.take(elements).cache().repeat()
        return reader, stream

    def _count_steps(self, dataset: tf.data.Dataset) -> int | None:
        """Returns the number of steps in a pass, if anybody asks; reads a pass if need be."""
        config = self._config
        if config.overfit_batches:
            return config.overfit_batches
        if not config.counts_epochs or self.is_endless:
            return None
        steps = self._sharing.find_number_of_steps(dataset)
        if steps is None:
            one_pass = self._sharing.make_batches(self._look(), self.is_endless)
            try:
                elements = one_pass.reduce(np.int64(0), lambda count, *_: count + 1)
            except tf.errors.OpError as error:
                explanation = self.explain_contradiction(error)
                if explanation is None:
                    raise
                raise SetupError(explanation) from error
            steps = int(elements) // (self._sharing.elements_per_batch or 1)
        if steps == 0:
            raise self.hook.reject(self.describe_shortage())
        return steps
