"""The training data: global batches from one iterator, and the share of each replica in them.

``create_dataset`` may batch as it likes: the engine makes global batches of its elements
(``Dataset.rebatch``), and in the graph each of the N x A shares, of N replicas and A micro-batches,
takes its rows, whose numbers differ by one at most. So a batch that does not divide, a smaller last
batch and a resume on other devices are no cases of their own: a run is a function of the data, the
seed and the global batch. Elements that are no rows (graphs, point sets: ``count_examples``), and
those of a ``make_batches``, are one share each, as they are.

A process reads one plain tf.data iterator, which a checkpoint can hold. Iterators of one dataset
share the state of its shuffles, so what has to be found out by reading is found out on a dataset
that is made for it, from the same seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.ahead import read_ahead
from ctl_core.autograph import is_default
from ctl_core.cluster.strategy import distribute, local_replicas
from ctl_core.compat import global_seed_generator_kept, scratch_graph
from ctl_core.hooks import Hook, Hooks, describe
from ctl_core.settings import Config
from ctl_core.units import Units


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """How a global batch is shared out.

    Attributes:
        batch: examples in a global batch, B
        replicas: N, over all processes
        accumulate_steps: A
    """

    batch: int
    replicas: int
    accumulate_steps: int

    @property
    def shares(self) -> int:
        """N A, into which a global batch is cut."""
        return self.replicas * self.accumulate_steps

    @property
    def per_replica(self) -> int:
        """The largest divisor of B that is no more than a share: what hooks of the data batch by.

        A divisor, so that a remainder which a hook drops is what the global batches leave over.
        """
        most = max(1, self.batch // self.shares)
        return next(size for size in range(most, 0, -1) if self.batch % size == 0)


@dataclasses.dataclass(frozen=True)
class Share:
    """What one replica has of a micro-batch.

    Attributes:
        batch: its rows; a first row as a stand-in, which counts nowhere, where it has none
        rows: how many it has, an int32 scalar; None where all shares have as many
        present: whether it has any, a scalar bool; None where that is sure
    """

    batch: Any
    rows: tf.Tensor | None = None
    present: tf.Tensor | None = None


class Input:
    """The endless stream of global batches of a run.

    Attributes:
        dataset: what ``iterator`` reads
        iterator: its position; part of every checkpoint
        share_spec: of the batch of one share
        steps_per_epoch: global batches in a pass; None where there is no end, or nobody counted
        whole: whether each element is a share by itself
        per_replica_batch_size: what hooks of the data were given
        unit: how many batches are read at once, see units.py; 0: one by one
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        shape: BatchShape,
        dataset: tf.data.Dataset,
        whole: bool,
        steps_per_epoch: int | None,
        per_replica_batch_size: int,
        make: Callable[[], tf.data.Dataset],
        make_pass: Callable[[], tf.data.Dataset],
    ) -> None:
        """Takes what ``create_input`` has made.

        Args:
            make: makes the dataset anew, as it was before anything was read from it
            make_pass: makes what ``create_dataset`` returned anew
        """
        self.strategy, self.shape, self.dataset, self.whole = strategy, shape, dataset, whole
        self.steps_per_epoch, self._make, self._make_pass = steps_per_epoch, make, make_pass
        self.per_replica_batch_size = per_replica_batch_size
        self.iterator: Any = None
        self.unit = 0
        element = dataset.element_spec
        self.share_spec = element if whole else tf.nest.map_structure(self._spec_of_share, element)
        self._varies = not whole and _static_rows(element) is None
        self._counted = _create_counter() if self._varies else None

    def _spec_of_share(self, spec: Any) -> Any:
        rows = _static_rows(spec)
        shares = self.shape.shares
        size = rows // shares if rows is not None and rows % shares == 0 else None
        if isinstance(spec, tf.RaggedTensorSpec):
            inner = spec.shape[1:] if spec.shape.rank is not None else None
            shape = None if inner is None else [size, *inner]
            return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
        if spec.shape.rank in (0, None):
            return spec
        return type(spec)([size, *spec.shape[1:]], spec.dtype)

    def draw(self) -> tuple[Callable[[Any], Any], Any]:
        """Draws a global batch, inside a graph function.

        Returns:
            A function that deals out the micro-batch of an index, the fields of a ``Share`` with a
            value for each replica of this process; and how many examples the global batch has,
            a number or an int32 tensor.
        """
        local, replicas = local_replicas(self.strategy), self.shape.replicas
        first = first_replica(self.strategy)

        if self.whole:

            def deal_elements(_: Any) -> Any:
                elements = [next(self.iterator) for _ in range(replicas)]
                return self._distribute([Share(e) for e in elements[first : first + local]])

            return deal_elements, self.shape.batch

        batch = next(self.iterator)
        rows = _static_rows(self.dataset.element_spec)
        examples = count_rows(batch) if rows is None else rows
        if self._counted is not None:
            self._counted.assign_add(tf.cast(examples, tf.int64))

        def deal_rows(micro_batch: Any) -> Any:
            numbers = [micro_batch * replicas + first + replica for replica in range(local)]
            return self._distribute(
                [take_share(batch, examples, i, self.shape.shares) for i in numbers]
            )

        return deal_rows, examples

    def _distribute(self, shares: list[Share]) -> tuple[Any, ...]:
        """Returns the fields of a ``Share``, each with a value for each replica of this process."""
        fields = zip(*((share.batch, share.rows, share.present) for share in shares), strict=True)
        return tuple(
            None if one[0] is None else distribute(self.strategy, [*one]) for one in fields
        )

    def count_examples(self, steps: int) -> int:
        """Returns how many examples so many steps had, since it was last asked."""
        if self._counted is None:
            return steps * self.shape.batch
        examples = int(self._counted.numpy())
        self._counted.assign(0)
        return examples

    def count_pass(self) -> int:
        """Returns how many examples a pass has: read once more, after it had too few."""
        with global_seed_generator_kept():
            return _count_all(self._make_pass())

    def begin(self, unit: int = 0) -> None:
        """Begins to read; ``unit`` batches at once where that is not 0."""
        self.unit = unit
        if unit:
            self.iterator = Units(self.dataset, unit)
        else:
            self.iterator = iter(read_ahead(self.dataset, for_long=True))

    def begin_anew(self) -> None:
        """Reads the data from their start, by another iterator."""
        with global_seed_generator_kept():
            self.dataset = self._make()
        self.begin(self.unit)

    def skip(self, examples: int) -> None:
        """Reads and drops so many examples: the way to a position that could not be saved."""
        if self.whole:
            steps = examples // self.shape.batch * self.shape.shares
            _skip_elements(self.iterator, tf.constant(steps, tf.int64))
        else:
            _skip_rows(self.iterator, tf.constant(examples, tf.int64))


def take_share(batch: Any, examples: Any, index: Any, shares: int) -> Share:
    """Returns the rows of one of many shares of a global batch.

    Args:
        batch: a structure of tensors, of which each has a row for each example, or is a scalar
        examples: how many there are; an int where that is fixed, otherwise an int32 tensor
        index: of the share, an int or an int32 tensor
        shares: how many there are
    """
    even = isinstance(examples, int) and examples % shares == 0
    size, more = examples // shares, examples % shares
    first = index * size  # those with a row more come first, those without any last
    if not even:
        first = first + tf.minimum(index, more)
        size = size + tf.cast(index < more, tf.int32)
    sure = isinstance(examples, int) and examples >= shares
    rows = None if even else tf.convert_to_tensor(size)
    present = None if sure else tf.convert_to_tensor(size > 0)
    if not sure:  # a stand-in
        size = tf.maximum(size, 1)
        first = tf.minimum(first, examples - size)
    part = tf.nest.map_structure(lambda tensor: _take_rows(tensor, first, size), batch)
    return Share(part, rows, present)


def _take_rows(tensor: Any, first: Any, size: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        start = tf.one_hot(0, tensor.shape.rank, tf.cast(first, tf.int64), dtype=tf.int64)
        rows = tf.cast(tf.reshape(size, [1]), tf.int64)
        return tf.sparse.slice(tensor, start, tf.concat([rows, tensor.dense_shape[1:]], 0))
    if tensor.shape.rank == 0:
        return tensor
    part = tensor[first : first + size]
    if isinstance(size, int) and not isinstance(tensor, tf.RaggedTensor):
        part = tf.ensure_shape(part, [size, *tensor.shape[1:]])
    return part


def create_input(
    hooks: Hooks, strategy: tf.distribute.Strategy, config: Config, per_replica: int | None = None
) -> Input:
    """Creates the training data from ``create_dataset`` and ``make_batches``.

    Args:
        hooks: those two, and ``count_examples``
        strategy: whose replicas share the batches
        config: sizes and the seed, which is set before each time that the hooks are called
        per_replica: the ``per_replica_batch_size`` of the run's first start; default: of this one

    Raises:
        SetupError: what the hooks return is no dataset, or not batched as it should be.
    """
    shape = BatchShape(config.batch_size, strategy.num_replicas_in_sync, config.accumulate_steps)
    sizes = {
        "per_replica_batch_size": per_replica or shape.per_replica,
        "global_batch_size": shape.batch,
        "input_context": tf.distribute.InputContext(1, 0, shape.replicas),
    }

    def create() -> tf.data.Dataset:
        keras.utils.set_random_seed(config.seed)
        dataset = check_dataset(hooks.create_dataset, hooks.create_dataset(**sizes))
        if own_batches:
            endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
            dataset = dataset if endless else dataset.repeat()
            made = hooks.make_batches(dataset=dataset, **sizes)
            dataset = check_dataset(hooks.make_batches, made)
        return dataset

    own_batches = not is_default(hooks.make_batches.function)
    hook = hooks.make_batches if own_batches else hooks.create_dataset
    by_rows = is_default(hooks.count_examples.function)
    keeps = config.keeps_last_batch
    first, size = create(), None
    endless = own_batches or first.cardinality() == tf.data.INFINITE_CARDINALITY
    if by_rows:
        _check_rows(hook, hooks.count_examples, first.element_spec)
    unread = not (own_batches or not by_rows or widths_vary(first.element_spec))
    if not unread:
        size = _count_first(hook, hooks.count_examples, first)
    share = shape.batch / shape.shares
    whole = size is not None and size != shape.batch and size == share
    by_sharing = size == shape.batch and (by_rows or shape.shares == 1)
    if (own_batches or not by_rows) and not (whole or by_sharing):
        raise hook.reject(_wrong_size(size, shape))
    whole = whole or not by_rows

    def group(dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns one pass of elements that the engine shares out."""
        if own_batches:
            return dataset
        if whole:
            return _take_groups(dataset, hooks.count_examples, int(share), shape.shares)
        if size == shape.batch:  # of several widths, so that they cannot be joined
            return dataset if keeps else _take_whole(dataset, shape.batch)
        elements, rows = int(dataset.cardinality()), _static_rows(dataset.element_spec)
        dataset = dataset.rebatch(shape.batch, drop_remainder=not keeps)
        if rows is None or elements < 0:
            return dataset
        partial = keeps and elements * rows % shape.batch > 0  # known without reading
        number = elements * rows // shape.batch + partial
        return dataset.apply(tf.data.experimental.assert_cardinality(number))

    steps = None
    if config.counts_epochs and not endless:
        steps = _count_elements(group(create())) // (shape.shares if whole else 1)
        if steps == 0:
            raise hook.reject(describe_shortage(_count_all(create()), shape.batch))
    if config.overfit_batches:
        steps = config.overfit_batches

    def make(dataset: tf.data.Dataset | None = None) -> tf.data.Dataset:
        dataset = group(create() if dataset is None else dataset)
        if config.overfit_batches:
            elements = config.overfit_batches * (shape.shares if whole else 1)
            return dataset.take(elements).cache().repeat()
        return dataset if endless else dataset.repeat()

    dataset = make(first if unread and steps is None else None)
    return Input(
        strategy, shape, dataset, whole, steps, sizes["per_replica_batch_size"], make, create
    )


def check_dataset(hook: Hook, made: Any) -> tf.data.Dataset:
    """Returns what a hook made.

    Raises:
        SetupError: it is no dataset.
    """
    if not isinstance(made, tf.data.Dataset):
        what = "nothing" if made is None else f"a {type(made).__name__}"
        raise hook.reject(f"returned {what}, expected a tf.data.Dataset.")
    return made


def _wrong_size(size: int | None, shape: BatchShape) -> str:
    own = f"per_replica_batch_size, {shape.batch // shape.shares}, or " * (shape.shares > 1)
    return (
        f"returned elements of {size} examples, expected {own}global_batch_size, {shape.batch}, "
        f"which {shape.shares} share{'s' * (shape.shares > 1)} of a step can divide."
    )


def _check_rows(hook: Hook, count_examples: Hook, spec: Any) -> None:
    """Refuses elements of which it is not clear how many examples they hold."""
    with scratch_graph("rows").as_default():
        element = make_placeholders(spec)
        try:
            rows = count_examples.in_graph(batch=element)
        except Exception as error:
            raise hook.reject(
                f"returned elements {describe(element)}: {error.__cause__ or error}."
            ) from error
    if rows is None:
        raise hook.reject(
            "returned single examples, expected batches: use dataset.batch(per_replica_batch_size)."
        )


def make_placeholders(spec: Any) -> Any:
    """Returns a batch of a specification that has no values, in a graph."""
    return tf.nest.map_structure(
        lambda one: tf.compat.v1.placeholder(one.dtype, one.shape), spec, expand_composites=True
    )


def widths_vary(spec: Any) -> bool:
    """Whether dense parts of elements may differ in more than their first dimension."""
    dense = [part for part in tf.nest.flatten(spec) if isinstance(part, tf.TensorSpec)]
    return any(part.shape.rank is None or None in part.shape[1:].as_list() for part in dense)


def _count_first(hook: Hook, count_examples: Hook, dataset: tf.data.Dataset) -> int:
    for element in dataset.take(1):
        return int(count_examples.in_graph(batch=element))
    raise hook.reject(describe_shortage(0, 1))


def describe_shortage(examples: int, batch: int) -> str:
    """Says, after the name of the hook, that a pass has less than one global batch."""
    if not examples:
        return "returned an empty dataset, or one with fewer examples than its own batches hold."
    return (
        f"returned {examples} examples, fewer than one global batch of {batch}; lower --batch-size."
    )


def _take_groups(
    dataset: tf.data.Dataset, count_examples: Hook, size: int, shares: int
) -> tf.data.Dataset:
    """Leaves out elements of another size than a share's, and those that fill no global batch."""

    def has_size(*parts: Any) -> tf.Tensor:
        element = parts if isinstance(dataset.element_spec, tuple) else parts[0]
        return tf.equal(tf.cast(count_examples.in_graph(batch=element), tf.int64), size)

    dataset = dataset.filter(has_size)
    if shares == 1 or dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return dataset
    return dataset.take(_count_elements(dataset) // shares * shares)


def _take_whole(dataset: tf.data.Dataset, rows: int) -> tf.data.Dataset:
    """Leaves out elements of another number of rows."""

    def pack(parts: tuple[Any, ...]) -> Any:
        return parts if isinstance(dataset.element_spec, tuple) else parts[0]

    def has_rows(*parts: Any) -> tf.Tensor:
        return tf.equal(count_rows(pack(parts)), rows)

    return dataset.filter(has_rows).map(lambda *parts: _fix_rows(pack(parts), rows))


def _count_elements(dataset: tf.data.Dataset) -> int:
    """Returns how many elements a pass has; they are read if nothing says so."""
    known = int(dataset.cardinality())
    if known >= 0:
        return known
    return int(dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))


def _count_all(dataset: tf.data.Dataset) -> int:
    return sum(int(count_rows(element)) for element in dataset)


def _static_rows(spec: Any) -> int | None:
    """Returns the first dimension of a structure's tensors or specs, if it is fixed."""
    for part in tf.nest.flatten(spec):
        if part.shape.rank:
            return part.shape[0]
    return None


def count_rows(batch: Any) -> tf.Tensor:
    """Returns how many rows a batch has, an int32 scalar."""
    for part in tf.nest.flatten(batch):
        if isinstance(part, tf.RaggedTensor):
            return tf.cast(part.nrows(), tf.int32)
        if isinstance(part, tf.SparseTensor):
            return tf.cast(part.dense_shape[0], tf.int32)
        if part.shape.rank != 0:
            return tf.shape(part)[0]
    raise AssertionError("single examples are refused")


def _fix_rows(batch: Any, rows: int) -> Any:
    def fix(part: Any) -> Any:
        if isinstance(part, tf.Tensor) and part.shape.rank:
            return tf.ensure_shape(part, [rows, *part.shape[1:]])
        return part

    return tf.nest.map_structure(fix, batch)


def _create_counter() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="examples")


def first_replica(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of the first of this process's replicas, among those of all processes."""
    resolver = strategy.cluster_resolver
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or resolver is None:
        return 0
    before = "chief" in resolver.cluster_spec().jobs and resolver.task_type == "worker"
    return (int(resolver.task_id) + int(before)) * local_replicas(strategy)


@tf.function(autograph=False)
def _skip_elements(iterator: Any, count: tf.Tensor) -> None:
    def drop(done: tf.Tensor) -> tuple[tf.Tensor]:
        next(iterator)
        return (done + 1,)

    tf.while_loop(lambda done: done < count, drop, (tf.constant(0, tf.int64),))


@tf.function(autograph=False)
def _skip_rows(iterator: Any, count: tf.Tensor) -> None:
    def drop(done: tf.Tensor) -> tuple[tf.Tensor]:
        return (done + tf.cast(count_rows(next(iterator)), tf.int64),)

    tf.while_loop(lambda done: done < count, drop, (tf.constant(0, tf.int64),))
