"""The training data: what the hooks return, as one endless stream of global batches.

``create_dataset`` may batch as it likes. Its elements are

- joined and cut into global batches (``Dataset.rebatch``), of which replicas take rows;
- global batches as they are, where their tensors differ in width, so that they cannot be joined,
  and each has the rows of one;
- shares as they are, one for each replica and micro-batch: graphs and point sets, which
  ``count_examples`` counts, what a ``make_batches`` of the user's returns, and padded batches of
  several widths that have the rows of one.

A process reads one plain tf.data iterator, which a checkpoint can hold; a replica's share of a
batch is taken in the graph, see batches.py. Iterators of one dataset share the state of its
shuffles, so what has to be found out by reading is found out on a dataset that is made for it, from
the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.cluster.collectives import local_replicas
from ctl_core.compat import drawing_from, global_seed_generator, scratch_graph
from ctl_core.hooks.hooks import Hook, Hooks, describe
from ctl_core.input.batches import (
    BatchShape,
    Share,
    count_rows,
    distribute_shares,
    first_replica,
    make_placeholders,
    static_rows,
    take_rows,
    take_share,
    widths_vary,
    with_rows,
)
from ctl_core.input.prefetch import StackedBatches, read_ahead
from ctl_core.input.readers import Reader, is_reader
from ctl_core.run.errors import brief
from ctl_core.run.settings import Config


class Input:
    """The endless stream of global batches of a run.

    Attributes:
        shape: of a global batch
        per_replica_batch_size: what hooks of the data are given
        whole: whether each element is a share by itself
        endless: whether a pass has no end
        steps_per_epoch: global batches in a pass; None where there is no end, or nobody counted
        dataset: what ``iterator`` reads
        reader: the reader in Python that knows the position, if there is one
        iterator: its position; part of every checkpoint
        share_spec: of the batch of one share
        unit: how many batches are read at once, see prefetch.py; 0: one by one
    """

    def __init__(
        self,
        hooks: Hooks,
        config: Config,
        strategy: tf.distribute.Strategy,
        shape: BatchShape,
        per_replica: int | None = None,
    ) -> None:
        """Looks at what the hooks return; begins to read when ``begin`` is called.

        Args:
            hooks: ``create_dataset``, ``make_batches`` and ``count_examples``
            config: sizes and the seed, which is set before each time that the hooks are called
            strategy: whose replicas share the batches
            shape: of a global batch
            per_replica: the ``per_replica_batch_size`` of the run's first start; default: of this

        Raises:
            SetupError: what they return is no dataset, or not batched as it should be.
        """
        self.shape = shape
        self.per_replica_batch_size = per_replica or shape.per_replica
        self.iterator: Any = None
        self.unit = 0
        self._hooks, self._config, self._strategy = hooks, config, strategy
        self._read: Reader | None = None
        self._by_rows = hooks.count_examples.is_default
        self._own_batches = not hooks.make_batches.is_default
        self._hook = hooks.make_batches if self._own_batches else hooks.create_dataset
        dataset = self.call_hooks()
        spec = dataset.element_spec
        self.endless = self._own_batches or dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        if self._by_rows:
            self._check_rows(spec)
        self._joins = self._by_rows and not self._own_batches and not widths_vary(spec)
        self._unread = dataset if self._joins else None
        size = shape.batch if self._joins else self._count_first(dataset)
        self.whole = not self._by_rows or (shape.shares > 1 and size * shape.shares == shape.batch)
        self._joins = self._joins or (size != shape.batch and not self.whole)
        self.steps_per_epoch = self._count_steps()
        self.dataset, self.reader = self.make()
        self._rows = shape.batch if self.whole else static_rows(self.dataset.element_spec)
        self._counted: Any = None
        if self._rows is None:
            with tf.device("CPU:0"):
                self._counted = tf.Variable(0, dtype=tf.int64, trainable=False, name="examples")
        self.share_spec = self.dataset.element_spec
        if not self.whole:
            rows, more = divmod(self._rows or 0, shape.shares)
            fixed = rows if rows and not more else None
            self.share_spec = tf.nest.map_structure(lambda one: with_rows(one, fixed), spec)

    # ---- Reading ---------------------------------------------------------------------------

    def draw(self) -> tuple[Callable[[Any], Any], Any]:
        """Draws a global batch, inside a graph function.

        Returns:
            A function that deals out the micro-batch of an index, the fields of a ``Share`` with a
            value for each replica of this process; and how many examples the global batch has,
            a number or an int32 tensor.
        """
        if self.whole:
            local, replicas = local_replicas(self._strategy), self.shape.replicas
            first = first_replica(self._strategy)

            def deal_elements(_: Any) -> Any:
                elements = [next(self.iterator) for _ in range(replicas)]
                own = [Share(element) for element in elements[first : first + local]]
                return distribute_shares(self._strategy, own)

            return deal_elements, self.shape.batch

        return self.deal_out(next(self.iterator))

    def deal_out(self, batch: Any) -> tuple[Callable[[Any], Any], Any]:
        """Returns the same as ``draw``, of a global batch that is drawn."""
        local, replicas = local_replicas(self._strategy), self.shape.replicas
        first = first_replica(self._strategy)
        examples = self._rows or count_rows(batch)
        if self._counted is not None:
            self._counted.assign_add(tf.cast(examples, tf.int64))

        def deal_rows(micro_batch: Any) -> Any:
            numbers = [micro_batch * replicas + first + replica for replica in range(local)]
            shares = self.shape.shares
            own = [take_share(batch, examples, i, shares, replicas) for i in numbers]
            return distribute_shares(self._strategy, own)

        return deal_rows, examples

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
        else:
            self.iterator = iter(read_ahead(self.dataset, for_long=True))

    def begin_anew(self) -> None:
        """Reads the data from their start, by another iterator."""
        with drawing_from(global_seed_generator()):
            self.dataset, self.reader = self.make()
        self.begin(self.unit)

    def skip(self, examples: int) -> None:
        """Reads and drops so many examples: the way to a position that could not be saved."""
        per_element = self.shape.batch // self.shape.shares if self.whole else None

        def drop(done: tf.Tensor) -> tuple[tf.Tensor]:
            element = next(self.iterator)
            return (done + tf.cast(per_element or count_rows(element), tf.int64),)

        @tf.function(autograph=False)
        def drop_all(number: tf.Tensor) -> None:
            tf.while_loop(lambda done: done < number, drop, (tf.constant(0, tf.int64),))

        drop_all(tf.constant(examples, tf.int64))
        if self.reader is not None:
            self.reader.note_used(examples)

    # ---- What the hooks return -------------------------------------------------------------

    def call_hooks(self) -> tf.data.Dataset:
        """Returns what the hooks of the data return."""
        sizes = {
            "per_replica_batch_size": self.per_replica_batch_size,
            "global_batch_size": self.shape.batch,
            "input_context": tf.distribute.InputContext(1, 0, self.shape.replicas),
        }
        hooks = self._hooks
        keras.utils.set_random_seed(self._config.seed)
        made = hooks.create_dataset(**sizes)
        self._read = open_reader(
            hooks.create_dataset, made, lambda: hooks.create_dataset(**sizes), self._read
        )
        if self._read is not None:
            made = self._read.read_elements(endless=self._own_batches)
        dataset = check_dataset(hooks.create_dataset, made)
        if not self._own_batches:
            return dataset
        if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
            dataset = dataset.repeat()
        return check_dataset(hooks.make_batches, hooks.make_batches(dataset=dataset, **sizes))

    def make(self) -> tuple[tf.data.Dataset, Reader | None]:
        """Returns the data as they are before anything was read from them.

        Returns:
            The endless dataset whose elements are global batches, or shares; and the reader that
            knows its position, if one does.
        """
        shape, number = self.shape, self._config.overfit_batches
        dataset, self._unread = self._unread or self.call_hooks(), None
        if self._read is not None and not self._own_batches and not number:
            per_element = shape.batch // shape.shares if self.whole else None
            return self._read.read_batches(self._make_pass, per_element), self._read
        dataset = self._make_pass(dataset)
        if not self.endless:
            dataset = dataset.repeat()
        if number:
            # Kept as they were read first: neither a shuffle nor noise makes others of them.
            number *= shape.shares if self.whole else 1
            dataset = dataset.take(number).cache().repeat()
        return dataset, None

    def _make_pass(self, dataset: tf.data.Dataset, numbered: bool = False) -> tf.data.Dataset:
        """Returns one pass of global batches, or of shares, of what the hooks returned.

        Args:
            dataset: what they returned
            numbered: whether its elements are pairs, the second part of which goes with the first
        """
        shape, keeps = self.shape, self._config.keeps_last_batch
        if self._joins:
            return dataset.rebatch(shape.batch, drop_remainder=not keeps)

        def pack(*parts: Any) -> Any:
            return parts if isinstance(dataset.element_spec, tuple) else parts[0]

        def has_size(*parts: Any) -> tf.Tensor:
            element = pack(*parts)[0] if numbered else pack(*parts)
            number = self._hooks.count_examples.in_graph(batch=element)
            size = shape.batch // shape.shares if self.whole else shape.batch
            return tf.equal(tf.cast(number, tf.int64), size)

        def fix_rows(*parts: Any) -> Any:
            return tf.nest.map_structure(lambda one: take_rows(one, 0, shape.batch), pack(*parts))

        if not self.whole:
            return dataset if keeps else dataset.filter(has_size).map(fix_rows)
        dataset = dataset.filter(has_size)
        if shape.shares == 1 or self.endless:
            return dataset
        groups = dataset.window(shape.shares, drop_remainder=True)
        return groups.flat_map(lambda *parts: tf.data.Dataset.zip(pack(*parts)))

    def _count_steps(self) -> int | None:
        """Returns the steps of a pass, if anybody asks for them; they are read if need be."""
        config, batch = self._config, self.shape.batch
        if config.overfit_batches:
            return config.overfit_batches
        if not config.counts_epochs or self.endless:
            return None
        dataset = self.call_hooks()
        elements, rows = int(dataset.cardinality()), static_rows(dataset.element_spec)
        if self._joins and rows is not None and elements >= 0:
            steps = (elements * rows + (batch - 1) * config.keeps_last_batch) // batch
        else:
            batches = self._make_pass(dataset)
            count = batches.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1)
            steps = int(count) // (self.shape.shares if self.whole else 1)
            self._unread = None  # its shuffles have been read from
        if steps == 0:
            raise self._hook.reject(describe_shortage(self.count_pass(), batch))
        return steps

    def count_pass(self) -> int:
        """Returns how many examples a pass has: read once more, after it had too few."""
        return sum(int(count_rows(element)) for element in self.call_hooks())

    def _check_rows(self, spec: Any) -> None:
        """Refuses elements of which it is not clear how many examples they hold."""
        with scratch_graph("rows").as_default():
            element = make_placeholders(spec)
            try:
                rows = self._hooks.count_examples.in_graph(batch=element)
            except Exception as error:
                why = error.__cause__ or error
                raise self._hook.reject(f"returned elements {describe(element)}: {why}.") from error
        if rows is None:
            raise self._hook.reject(
                "returned single examples, expected batches: use "
                "dataset.batch(per_replica_batch_size)."
            )

    def _count_first(self, dataset: tf.data.Dataset) -> int:
        """Returns how many examples the first element has.

        Raises:
            SetupError: there is none, or the hooks leave no other way to batch than theirs, and it
                is neither a share nor a global batch.
        """
        shape = self.shape
        element = next(iter(dataset.take(1)), None)
        if element is None:
            raise self._hook.reject(describe_shortage(0, shape.batch))
        size = int(self._hooks.count_examples.in_graph(batch=element))
        fits = size * shape.shares == shape.batch or (self._by_rows and size == shape.batch)
        if not fits and (self._own_batches or not self._by_rows):
            raise self._hook.reject(
                f"returned elements of {size} examples, expected per_replica_batch_size, or "
                f"global_batch_size, {shape.batch}, of which {shape.shares} have equal shares."
            )
        return size


def open_reader(
    hook: Hook, made: Any, remake: Callable[[], Any], before: Reader | None = None
) -> Reader | None:
    """Returns a reader of what a hook made, the same one as before of the same object.

    Returns:
        None if it is no reader in Python.

    Raises:
        SetupError: it cannot be read.
    """
    if not is_reader(made):
        return None
    if before is not None and before.made is made:
        return before
    try:
        return Reader(made, remake)
    except Exception as error:
        raise hook.reject(f"reading the data: {brief(error)}") from error


def check_dataset(hook: Hook, made: Any) -> tf.data.Dataset:
    """Returns what a hook made.

    Raises:
        SetupError: it is no dataset.
    """
    if not isinstance(made, tf.data.Dataset):
        what = "nothing" if made is None else f"a {type(made).__name__}"
        raise hook.reject(f"returned {what}, expected a tf.data.Dataset, or a reader.")
    return made


def describe_shortage(examples: int, batch: int) -> str:
    """Says, after the name of the hook, that a pass has less than one global batch."""
    if not examples:
        return "returned an empty dataset, or one with fewer examples than its own batches hold."
    return (
        f"returned {examples} examples, fewer than one global batch of {batch}; lower --batch-size."
    )
