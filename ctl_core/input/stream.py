"""The training data: what the hooks return, as one endless stream of global batches.

``create_dataset`` and ``make_batches`` may batch as they like. Their elements are

- joined and cut into global batches (``Dataset.rebatch``), of which replicas take rows;
- global batches as they are, where their tensors differ in width, so that they cannot be joined,
  and each has the rows of one;
- whole shares, one for each replica and micro-batch: graphs and point sets, whose examples
  ``count_examples`` counts.

A process reads one plain tf.data iterator, which a checkpoint can hold; a replica's share of a
batch is taken in the graph, see batches.py. Iterators of one dataset share the state of its
shuffles: so what has to be found out by reading is found out on a dataset that is made for it, from
the same seed.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.cluster.collectives import count_local_replicas
from ctl_core.compat import draw_from, get_seed_generator
from ctl_core.hooks.hooks import Hooks, describe
from ctl_core.input.batches import (
    BatchShape,
    Share,
    add_to_digest,
    count_rows,
    distribute_shares,
    find_first_replica,
    has_varying_widths,
    set_rows,
    take_share,
)
from ctl_core.input.prefetch import StackedBatches, read_ahead
from ctl_core.input.readers import Reader, open_reader
from ctl_core.run.settings import Config


class Input:
    """The endless stream of global batches of a run.

    Attributes:
        shape: of a global batch
        per_replica_batch_size: that hooks of the data are given, the same on any devices if joined
        whole: whether each element is a share by itself
        endless: whether a pass has no end
        steps_per_epoch: global batches in a pass; None without an end, and until they are counted
        dataset: what ``source``, an iterator, reads; its position is part of every checkpoint
        held: variables with what was read and not yet drawn; part of every checkpoint, too
        iterator: what batches are drawn from
        reader: the reader in Python that knows the position, if there is one
        share_spec: of the batch of one share
        unit: how many batches are read at once, see prefetch.py; 0: one by one
    """

    def __init__(
        self,
        hooks: Hooks,
        config: Config,
        strategy: tf.distribute.Strategy,
        shape: BatchShape,
    ) -> None:
        """Inspects what the hooks return; ``begin`` begins to read.

        Raises:
            SetupError: what the hooks return is no dataset, or not batched as it should be.
        """
        self.shape = shape
        self.whole = not hooks.count_examples.is_default
        self.per_replica_batch_size = shape.per_replica if self.whole else shape.batch
        self.iterator: Any = None
        self.source: Any = None
        self.held: tuple[tf.Variable, ...] = ()
        self.unit = 0
        self._hooks, self._config, self._strategy = hooks, config, strategy
        self._opened: Reader | None = None
        self._second: tf.data.Dataset | None = None
        self._makes_batches = not hooks.make_batches.is_default
        self._hook = hooks.make_batches if self._makes_batches else hooks.create_dataset
        made = self._call_hooks()
        spec = made.element_spec
        self.endless = self._makes_batches or made.cardinality() == tf.data.INFINITE_CARDINALITY
        size = self._inspect(spec)
        self._joins = not self.whole and not (size and config.keeps_last_batch)
        # Examples that each element has to have; None: any number.
        self._size: Any = size if self.whole or self._joins else None
        self.steps_per_epoch = self._count_steps(made)
        self._open(made)
        parts = tf.nest.flatten(self.dataset.element_spec)
        fixed = next((part.shape[0] for part in parts if part.shape.rank), None)
        self._rows = shape.batch if self.whole else fixed
        self._counted: Any = None
        self._digest: Any = None  # of what was drawn, where other processes should draw the same
        with tf.device("CPU:0"):
            if self._rows is None:
                self._counted = tf.Variable(0, dtype=tf.int64, trainable=False, name="examples")
            if shape.replicas > count_local_replicas(strategy):
                self._digest = tf.Variable(made.cardinality(), trainable=False, name="digest")
        self.share_spec = self.dataset.element_spec
        if not self.whole:
            rows, more = divmod(self._rows or 0, shape.shares)
            fixed = rows if rows and not more else None
            self.share_spec = tf.nest.map_structure(lambda one: set_rows(one, fixed), spec)

    def draw(self) -> tuple[Callable[[Any], Any], Any]:
        """Draws a global batch, inside a graph function.

        Returns:
            A function that deals out the micro-batch of an index, the fields of a ``Share`` with a
            value for each replica of this process; and how many examples the global batch has,
            a number or an int32 tensor.
        """
        return self.deal_out(None if self.whole else self._read())

    def deal_out(self, batch: Any) -> tuple[Callable[[Any], Any], Any]:
        """Returns the same, of a global batch that is drawn; None: of shares, drawn as dealt."""
        shares, replicas = self.shape.shares, self.shape.replicas
        first = find_first_replica(self._strategy)
        own = slice(first, first + count_local_replicas(self._strategy))
        examples = self._rows or count_rows(batch)
        if self._counted is not None:
            self._counted.assign_add(tf.cast(examples, tf.int64))

        def deal(micro_batch: Any) -> Any:
            if self.whole:  # those of other processes are read, too
                dealt = [Share(self._read()) for _ in range(replicas)][own]
            else:
                numbers = [micro_batch * replicas + replica for replica in range(replicas)][own]
                dealt = [take_share(batch, examples, i, shares, replicas) for i in numbers]
            return distribute_shares(self._strategy, dealt)

        return deal, examples

    def _read(self) -> Any:
        element = next(self.iterator)
        if self._digest is not None:
            with tf.device("CPU:0"):
                self._digest.assign(add_to_digest(self._digest, element))
        return element

    @property
    def digest(self) -> int:
        """A number that differs, all but surely, where processes have drawn different data."""
        return 0 if self._digest is None else int(self._digest.numpy())

    def count_new_examples(self, steps: int) -> int:
        """Returns how many examples so many steps had, since it was last asked."""
        examples = steps * self.shape.batch
        if self._counted is not None:
            examples = int(self._counted.numpy())
            self._counted.assign(0)
        if self.reader is not None:
            self.reader.note_used(examples)
        return examples

    def begin(self, unit: int = 0) -> None:
        """Begins to read; ``unit`` batches at once where that is not 0."""
        self.unit = unit
        if unit:
            self.iterator = StackedBatches(self.dataset, unit)
            self.source, self.held = self.iterator.source, self.iterator.variables
        else:
            self.iterator = self.source = iter(read_ahead(self.dataset, for_long=True))

    def begin_anew(self, skip: int = 0) -> None:
        """Reads the data from their start, by another iterator, and drops so many examples."""
        with draw_from(get_seed_generator()):
            self._open(self._call_hooks())
        self.begin(self.unit)
        dropped = 0
        while dropped < skip:
            element = next(self.iterator)
            dropped += self._size if self.whole else int(count_rows(element))
        if self.reader is not None:
            self.reader.note_used(skip)

    def make_pass(self) -> tf.data.Dataset:
        """Returns a pass, or all that has no end, to look at; its data are let go afterwards."""
        look, self._second = self._look(), None
        return self._batch(look)

    def describe_shortage(self) -> str:
        """Says, after the name of the hook, that a pass has less than a global batch; reads it."""
        examples = self._count_examples() or "an empty dataset, no"
        size = f"one global batch of {self.shape.batch}"
        return f"returned {examples} examples, fewer than {size}; lower --batch-size."

    def _look(self) -> tf.data.Dataset:
        if self._second is None:
            opened, self._second = self._opened, self._call_hooks()
            self._opened = opened  # which training reads
        return self._second

    def _call_hooks(self) -> tf.data.Dataset:
        """Returns what the hooks of the data return; ``_opened`` is what reads it, if need be."""
        sizes = {
            "per_replica_batch_size": self.per_replica_batch_size,
            "global_batch_size": self.shape.batch,
            "input_context": tf.distribute.InputContext(1, 0, self.shape.replicas),
        }
        hook = self._hooks.create_dataset
        keras.utils.set_random_seed(self._config.seed)
        dataset = hook(**sizes)
        self._opened = open_reader(hook, dataset, lambda: hook(**sizes), self._opened)
        if self._opened is not None:
            dataset = self._opened.read(goes_on=self._makes_batches)
        if self._makes_batches:
            if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
                dataset = dataset.repeat()
            dataset = self._hooks.make_batches(dataset=dataset, **sizes)
        return dataset

    def _count_examples(self, elements: int = -1) -> int:
        """Returns how many examples the first elements have, or all of a pass."""
        count, first = self._hooks.count_examples, self._look().take(elements)
        return sum(int(count.trace(batch=element)) for element in first)

    def _inspect(self, spec: Any) -> int | None:
        """Returns how many examples an element has that is used as it is; None: they are joined."""
        batch, shares = self.shape.batch, self.shape.shares
        if self.whole:
            if (size := self._count_examples(1)) * shares != batch:
                raise self._hook.reject(
                    f"returned elements of {size} examples, expected {batch} / {shares}: where "
                    "count_examples counts, each is the share of a replica."
                )
            return size
        parts = tf.nest.flatten(spec)
        are_tensors = all(hasattr(part, "shape") for part in parts)
        sizes = {part.shape[0] for part in parts if are_tensors and part.shape.rank != 0}
        if not sizes or len(sizes - {None}) > 1:
            raise self._hook.reject(
                f"returned elements {describe(spec)}, expected batches of tensors that have a "
                "row for each example: use dataset.batch(global_batch_size), or write "
                "count_examples."
            )
        return batch if has_varying_widths(spec) and self._count_examples(1) == batch else None

    def _open(self, dataset: tf.data.Dataset) -> None:
        """Makes the endless stream of what the hooks returned, of which nothing has been read."""
        number = self._config.overfit_batches
        self.reader = None if self._makes_batches or number else self._opened
        if self.reader is not None:
            keeps = self._config.keeps_last_batch and not self.whole
            multiple = 1 if keeps else self.shape.batch
            dataset = self.reader.read(True, self._count_used, multiple)
        self.dataset = one = self._batch(dataset)
        if not self.endless:
            self.dataset = one.repeat()
        if self.reader is not None:
            # The rest of the pass that a resumed run is in may have no batch, at which repeat ends.
            self.dataset = one.concatenate(self.dataset)
        if number:
            # Kept as they were read first: neither a shuffle nor noise makes others of them.
            number *= self.shape.shares if self.whole else 1
            self.dataset = self.dataset.take(number).cache().repeat()

    def _batch(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns one pass of global batches, or of shares."""
        shape, is_tuple = self.shape, isinstance(dataset.element_spec, tuple)

        def has_size(*parts: Any) -> tf.Tensor:
            count = self._hooks.count_examples.trace(batch=parts if is_tuple else parts[0])
            return tf.equal(tf.cast(count, tf.int64), self._size)

        if self._size is not None:
            dataset = dataset.filter(has_size)
        if self._joins:
            return dataset.rebatch(shape.batch, drop_remainder=not self._config.keeps_last_batch)
        if self.whole and shape.shares > 1 and not self.endless:
            groups = dataset.window(shape.shares, drop_remainder=True)
            zip_parts = tf.data.Dataset.zip
            return groups.flat_map(lambda *parts: zip_parts(parts if is_tuple else parts[0]))
        return dataset

    def _count_used(self, element: Any) -> int:
        """Returns how many examples of a reader's element steps use."""
        if self._size is None:
            return len(next(part for part in tf.nest.flatten(element) if part.ndim))
        with tf.device("CPU:0"):
            batch = tf.nest.map_structure(tf.constant, element)
            examples = int(self._hooks.count_examples.trace(batch=batch))
        return examples if examples == self._size else 0

    def _count_steps(self, dataset: tf.data.Dataset) -> int | None:
        """Returns the steps of a pass, if anybody asks for them; they are read if need be."""
        config, batch = self._config, self.shape.batch
        if config.overfit_batches:
            return config.overfit_batches
        if not config.counts_epochs or self.endless:
            return None
        all_join = self._joins and self._size is None
        examples = int(dataset.unbatch().cardinality()) if all_join else -1
        if examples >= 0:
            steps = (examples + (batch - 1) * config.keeps_last_batch) // batch
        else:
            count = self._batch(self._look()).reduce(np.int64(0), lambda count, *_: count + 1)
            steps = int(count) // (self.shape.shares if self.whole else 1)
        if steps == 0:
            raise self._hook.reject(self.describe_shortage())
        return steps
