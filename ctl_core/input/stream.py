"""Reads the training data as an endless stream of global batches.

Each process reads one plain tf.data iterator, whose position can be saved in a checkpoint. The
graph cuts each batch into the shares of the replicas. sharing.py decides how elements become
batches and shares. data_hooks.py calls the hooks that create the dataset.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.cluster.collectives import count_local_replicas
from ctl_core.compat import (
    call_function,
    draw_from,
    find_inputs,
    get_seed_generator,
    has_free_order,
    has_function,
    is_op_determinism_enabled,
    is_shuffle,
    list_stages,
)
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.input.batches import (
    BatchShape,
    LocatedBatch,
    Share,
    add_to_digest,
    distribute_shares,
    find_first_replica,
    find_process_leaves,
    find_rows,
    take_batch_rows,
)
from ctl_core.input.data_hooks import DataHooks, HookedData
from ctl_core.input.own_rows import RowSelection
from ctl_core.input.prefetch import StackedBatches, read_ahead
from ctl_core.input.readers import Reader
from ctl_core.input.sharing import (
    OwnRows,
    choose_sharing,
    explain_contradiction,
    is_contradiction,
    read_count,
)
from ctl_core.numerics.summation_tree import split_leaves
from ctl_core.run.errors import SetupError, quote
from ctl_core.run.settings import Config
from ctl_core.types import Batch, Count

# A function that takes the index of a micro-batch and returns its share. The fields of the share
# are per-replica values, with one component for each replica of this process.
Deal = Callable[[Count], Share]

# The maximum number of seconds to search for a damaged element.
_LONGEST_SEARCH = 60.0
# A string of at most this length is assumed to be a path rather than data.
_LONGEST_PATH = 300
# The maximum number of elements to read again, in order to find the element that caused an error.
_MOST_EXPLAINED = 1000


class Input:
    """The endless stream of global batches of a run.

    Attributes:
        shape: the shape of a global batch
        hook: the hook that returned the dataset; error messages name this hook
        is_stream: whether ``make_batches`` returned a new, endless dataset
        is_endless: whether the data are endless, so that there are no passes
        steps_per_epoch: the number of global batches in a pass, or the value of ``overfit_batches``
            if this setting is used; None if the data are endless, or if no setting needs the number
            (see ``Config.counts_epochs``)
        steps_per_pass: like ``steps_per_epoch``, but also set if no setting needs the number and
            TensorFlow knows it without reading the data
        mark: the call of ``ctl.data.own_rows`` in the pipeline; None if there is none
        dataset: the dataset that ``stream`` reads
        stream: the tf.data iterator whose position is saved in each checkpoint; None before
            ``begin``
        held: the variables with batches that were read but not drawn yet. They are saved in each
            checkpoint, too
        iterator: the iterator from which batches are drawn; None before ``begin``
        reader: the Python reader whose position is saved; None if no reader is used
        share_spec: the specification of the batch of a share
        unit: the number of batches that are read at once, see prefetch.py; 0 if batches are read
            one by one
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
            SetupError: the hooks do not return a dataset, or the dataset is not batched correctly.
        """
        self._config = config
        self._strategy = strategy
        self._count_examples = hooks.count_examples
        selection = RowSelection(
            batch=shape.batch,
            leaves=shape.leaves,
            process_leaves=find_process_leaves(shape, strategy),
            keeps_last_batch=config.keeps_last_batch,
        )
        self._data_hooks = DataHooks(hooks, config.seed, shape.replicas, selection)
        self._second: HookedData | None = None
        self._sharing, data = choose_sharing(self._data_hooks, hooks, shape, config)
        self._reader = data.reader
        self.mark = data.mark
        element_spec = None
        if not self._sharing.by_rows:
            element_spec = data.dataset.element_spec
        self.shape = dataclasses.replace(
            shape, by_rows=self._sharing.by_rows, element_spec=element_spec
        )
        self.hook: Hook = data.hook
        self.is_stream = data.is_stream
        cardinality = data.dataset.cardinality()
        self.is_endless = data.is_stream or bool(cardinality == tf.data.INFINITE_CARDINALITY)
        if data.mark is not None:
            self.is_endless = data.mark.is_endless
        self.steps_per_epoch = self._count_steps(data.dataset)
        self.steps_per_pass = self.steps_per_epoch
        if self.steps_per_epoch is None and not self.is_endless:
            self.steps_per_pass = self._sharing.find_number_of_steps(data.dataset) or None
        self.reader, self.dataset = self._make_stream(data)
        spec = self.dataset.element_spec
        self.share_spec = self._sharing.make_share_spec(spec)
        self._fixed_size = self._sharing.find_fixed_size(spec)
        with tf.device("CPU:0"):
            # The number of examples drawn since the last call of ``count_new_examples``; None if
            # all batches have the same size.
            self._drawn: tf.Variable | None = None
            if self._fixed_size is None:
                self._drawn = tf.Variable(0, dtype=tf.int64, trainable=False, name="examples")
            # A checksum of the drawn batches. It is compared between processes, because all of them
            # should draw the same batches; None if there is only one process.
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
            A function that returns the shares of a micro-batch, and the number of examples in the
            global batch.
        """
        return self.deal_out(self._sharing.draw(self._read))

    def deal_out(self, drawn: Batch | None) -> tuple[Deal, Count]:
        """Returns the same values as ``draw``, for a global batch that has already been drawn.

        Args:
            drawn: the global batch, or the rows of this process; None if the shares are drawn one
                by one when they are used
        """
        first = find_first_replica(self._strategy)
        replicas = range(first, first + count_local_replicas(self._strategy))
        batch = self._sharing.locate(drawn, self._fixed_size)
        if self._drawn is not None:
            self._drawn.assign_add(tf.cast(batch.examples, tf.int64))

        def deal(micro_batch: Count) -> Share:
            if self.shape.logical_replicas is not None:
                return self._deal_to_logical_replicas(batch)
            shares = self._sharing.take_shares(batch, micro_batch, replicas, self._read)
            return distribute_shares(self._strategy, shares)

        return deal, batch.examples

    def _deal_to_logical_replicas(self, batch: LocatedBatch) -> Share:
        """Returns a share with the rows, or packed elements, of each device's logical replicas."""
        leaves = self.shape.leaves
        rows: Count = leaves
        if self.shape.by_rows:
            rows = batch.examples
        first_device = find_first_replica(self._strategy)
        end_device = first_device + count_local_replicas(self._strategy)
        shares = []
        for device_leaves in split_leaves(leaves, self.shape.replicas)[first_device:end_device]:
            first, size = find_rows(device_leaves, rows, leaves)
            shares.append(Share(take_batch_rows(batch.rows, first - batch.first_row, size)))
        return distribute_shares(self._strategy, shares)

    def _read(self) -> Batch:
        element = next(self.iterator)
        if self._digest is not None:
            with tf.device("CPU:0"):
                compared = self._sharing.list_compared(element)
                self._digest.assign(add_to_digest(self._digest, compared))
        return element

    @property
    def digest(self) -> int:
        """A checksum of the batches that were drawn; 0 if there is only one process.

        If two processes have drawn different data, their checksums almost certainly differ.
        """
        if self._digest is None:
            return 0
        return int(self._digest.numpy())

    def count_new_examples(self, steps: int) -> int:
        """Returns the number of examples in the ``steps`` steps taken since the previous call."""
        examples = steps * self.shape.batch
        if self._drawn is not None:
            examples = int(self._drawn.numpy())
            self._drawn.assign(0)
        if self.reader is not None:
            self.reader.note_used(examples)
        return examples

    def begin(self, unit: int = 0) -> None:
        """Starts reading ``unit`` batches at once, or batches one by one if ``unit`` is 0."""
        self.unit = unit
        if unit:
            self.iterator = StackedBatches(self.dataset, unit)
            self.stream = self.iterator.stream
            self.held = self.iterator.variables
        else:
            self.stream = iter(read_ahead(self.dataset, for_long=True))
            self.iterator = self.stream

    def end(self) -> None:
        """Gives up the iterator, so that reading ends once no graph refers to it."""
        self.iterator = None
        self.stream = None
        self.held = ()

    def begin_anew(self, skip: int = 0) -> None:
        """Restarts the data from the beginning, and skips the first ``skip`` examples."""
        # This process may have restored its position although another process could not.
        if self.reader is not None:
            self.reader.discard_position()
        dropped = 0
        selection = self._data_hooks.selection
        if isinstance(self._sharing, OwnRows) and not self._config.overfit_batches:
            # The batches are skipped before ``own_rows``, so none of their examples is prepared.
            batches = selection.count_batches(skip, self._sharing.examples)
            self._sharing = self._sharing.start_at(batches)
            selection = self._sharing.selection
            dropped = skip
        with draw_from(get_seed_generator()):
            size = self._sharing.per_replica_batch_size
            data = self._data_hooks.call(size, self._reader, selection)
            self._reader = data.reader
            self.reader, self.dataset = self._make_stream(data)
        self.begin(self.unit)
        while dropped < skip:
            element = next(self.iterator)
            if self.shape.by_rows:
                dropped += int(self._sharing.locate(element, self._fixed_size).examples)
            else:
                dropped += self.shape.per_replica
        if self.reader is not None:
            self.reader.note_used(skip)

    @property
    def reads_mark_again(self) -> bool:
        """True if a resumed run always reads the part before ``ctl.data.own_rows`` again.

        In a cluster, each process would need a position of its own. After a run was resumed in this
        way, its pipeline has other stages, so it cannot restore a position in the original one.
        """
        if not isinstance(self._sharing, OwnRows):
            return False
        selection = self._sharing.selection
        return not selection.has_all_rows or selection.start > 0

    def has_free_order(self) -> bool:
        """Returns whether the order of the examples may differ from run to run."""
        return (
            self.reader is None and not is_op_determinism_enabled() and has_free_order(self.dataset)
        )

    def make_pass(self) -> tf.data.Dataset:
        """Returns a dataset for inspection: one pass of batches or, for endless data, all batches.

        After ``ctl.data.own_rows``, the dataset is endless. If elements are shares, it contains
        shares instead of global batches.
        """
        dataset = self._look().dataset
        self._second = None  # frees the memory of the dataset's data
        if isinstance(self._sharing, OwnRows):
            return self._sharing.make_global_batches(dataset)
        return self._sharing.make_batches(dataset, self.is_endless)

    def describe_shortage(self) -> str:
        """Returns a message that a pass is smaller than one global batch.

        The message continues a sentence that begins with the name of the hook.
        """
        inspected = self._look()
        if inspected.mark is not None:
            number = inspected.mark.count_examples()
        else:
            elements = inspected.dataset
            number = sum(read_count(self._count_examples, element) or 0 for element in elements)
        examples = number or "an empty dataset, no"
        size = f"one global batch of {self.shape.batch}"
        return f"returned {examples} examples, fewer than {size}; lower --batch-size."

    def explain_contradiction(self, error: BaseException) -> str | None:
        """Explains an error that was raised because the examples of an element are not its rows.

        Reads the data again to find this element. Returns None for all other errors.
        """
        if not is_contradiction(error):
            return None
        self._second = None  # this dataset may have been read already
        elements = self._look().dataset.take(_MOST_EXPLAINED)
        explanation = explain_contradiction(self._count_examples, elements, self.shape.batch)
        return f"{self.hook}: {explanation}."

    def find_damaged_element(self) -> str | None:
        """Reads the data again, to find the element for which a function of the pipeline fails.

        Returns:
            The path in the element, or the index of the element; None if it is not found within
            ``_LONGEST_SEARCH`` seconds.
        """
        if self._reader is not None:
            return None
        self._second = None  # this dataset may have been read already
        deadline = time.monotonic() + _LONGEST_SEARCH
        for stage in reversed(list(list_stages(self._look().dataset))):  # the source comes first
            if has_function(stage):
                (source,) = find_inputs(stage)
                try:
                    element = _find_failing(stage, source, deadline)
                except tf.errors.OpError:  # another stage, which has no function, fails
                    return None
                if element is not None:
                    return element
        return None

    def _look(self) -> HookedData:
        """Returns a second dataset for inspection, so that the training dataset stays unread.

        The second dataset contains the rows of all processes.
        """
        if self._second is None:
            size = self._sharing.per_replica_batch_size
            self._second = self._data_hooks.call(size, self._reader)
        return self._second

    def _make_stream(self, data: HookedData) -> tuple[Reader | None, tf.data.Dataset]:
        """Returns the reader whose position is saved, or None, and the endless dataset of batches.

        Args:
            data: the results of the data hooks
        """
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
        if not self.is_endless and data.mark is None:
            stream = one_pass.repeat()
        if reader is not None:
            # A resumed run starts within a pass, and the rest of this pass may contain no batch.
            # ``repeat`` ends at a pass without batches, so this pass is placed before ``repeat``.
            stream = one_pass.concatenate(stream)
        if overfit_batches:
            # The cache keeps the batches of the first pass, so that shuffling or random
            # augmentation cannot change them.
            elements = overfit_batches * (self._sharing.elements_per_batch or 1)
            stream = stream.take(elements).cache().repeat()
        return reader, stream

    def _count_steps(self, dataset: tf.data.Dataset) -> int | None:
        """Returns the number of steps in a pass. Reads one pass if this is necessary to count them.

        Returns None if the data are endless, or if no setting needs the number.
        """
        config = self._config
        if config.overfit_batches:
            return config.overfit_batches
        if not config.counts_epochs or self.is_endless:
            return None
        steps = self._sharing.find_number_of_steps(dataset)
        if steps is None:
            one_pass = self._sharing.make_batches(self._look().dataset, self.is_endless)
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


def _find_failing(stage: tf.data.Dataset, source: tf.data.Dataset, deadline: float) -> str | None:
    """Describes the first element for which the function of a stage fails; None if it is not found.

    Args:
        stage: a stage that calls a function for each element
        source: the stage that it reads
        deadline: the time at which the search ends

    Raises:
        OpError: the source itself cannot be read.
    """
    for index, element in enumerate(source):
        if time.monotonic() > deadline:
            return None
        try:
            call_function(stage, element)
        except tf.errors.OpError:
            for value in tf.nest.flatten(element):
                if value.dtype == tf.string and value.shape.rank == 0:
                    text = value.numpy().decode("utf-8", "replace")
                    if len(text) < _LONGEST_PATH and text.isprintable():
                        return f"the element of {quote(text, _LONGEST_PATH)}"
            if any(map(is_shuffle, list_stages(source))):
                return None
            return f"element {index} (counted from 0)"
    return None
