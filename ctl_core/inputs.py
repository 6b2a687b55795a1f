"""The training data: from the user's dataset to one value per replica, drawn inside the graph.

A process reads one plain tf.data iterator, which a checkpoint can hold, and deals its elements
out to the local replicas in turn. In a cluster of P processes, process p takes every P-th element
from the p-th on. The N replicas of a step thus get the examples that one device would get with
the whole batch: a run does not depend on N.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.cluster import Cluster
from ctl_core.errors import SetupError, brief
from ctl_core.hooks import Hook, Hooks
from ctl_core.randomness import random_ops
from ctl_core.strategy import Task


@dataclasses.dataclass
class Input:
    """The endless stream of replica batches of this process.

    Attributes:
        strategy: deals the batches out
        replicas: how many replicas this process has
        dataset: the repeated dataset, one element = one replica's batch
        iterator: its position; part of every checkpoint
        epoch: the dataset of one pass, or None where there is no end to a pass; what a process
            reads of it, if the hooks shard for themselves, otherwise the whole
        sharded: whether the hooks shard for themselves
        unsavable: why the position cannot be saved exactly, or None
        accumulate_steps: how many elements of a replica make a step
        clock: whether there is one in the graph; not where ops are deterministic
        waited: seconds that watched steps have waited for elements, a float64 scalar
        watched: how many steps that are
    """

    strategy: tf.distribute.Strategy
    replicas: int
    dataset: tf.data.Dataset
    iterator: Any
    epoch: tf.data.Dataset | None
    sharded: bool
    unsavable: str | None
    accumulate_steps: int = 1
    clock: bool = True
    waited: tf.Variable = dataclasses.field(default_factory=lambda: _seconds())
    watched: int = 0

    def draw(self, watch: bool) -> Any:
        """Draws the next element for each local replica; runs inside a graph function.

        Args:
            watch: whether to add to ``waited``, which costs some ten microseconds
        """
        if not (watch and self.clock):
            return deal(self.strategy, [next(self.iterator) for _ in range(self.replicas)])
        start = tf.timestamp()
        with tf.control_dependencies([start]):
            values = [next(self.iterator) for _ in range(self.replicas)]
        with tf.control_dependencies(tf.nest.flatten(values, expand_composites=True)):
            self.waited.assign_add(tf.timestamp() - start)
        return deal(self.strategy, values)

    def seconds_waited(self, steps: int) -> float | None:
        """How long so many steps have waited for their elements, as far as the watched ones tell.

        Returns:
            None if none was watched.
        """
        if not (self.watched and self.clock):
            return None
        return float(self.waited.numpy()) / self.watched * steps

    def skip(self, elements: int) -> None:
        """Moves on by so many elements: the way to a position that could not be saved."""
        skip_elements(self.iterator, tf.constant(elements, tf.int64))

    def steps_per_epoch(self) -> int | None:
        """Counts the steps of one pass, reading it once if its length is not known.

        Returns:
            The number of global batches, or None if a pass has no end.
        """
        if self.epoch is None:
            return None
        elements = int(self.epoch.cardinality())
        if elements < 0:
            elements = int(self.epoch.reduce(tf.constant(0, tf.int64), lambda n, *_: n + 1))
        replicas = self.replicas if self.sharded else self.strategy.num_replicas_in_sync
        return elements // (replicas * self.accumulate_steps)


def _seconds() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0.0, dtype=tf.float64, trainable=False, name="waited")


def deal(strategy: tf.distribute.Strategy, values: list[Any]) -> Any:
    """Hands the i-th value to the i-th replica of this process."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group % len(values)]
    )


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Counts the replicas of this process; every process of a cluster has as many."""
    return len(strategy.extended.worker_devices)


@tf.function(autograph=False)
def skip_elements(iterator: Any, count: tf.Tensor) -> None:
    """Draws ``count`` elements and drops them, in one graph call."""

    def drop(done: tf.Tensor) -> tuple[tf.Tensor]:
        next(iterator)
        return (done + 1,)

    tf.while_loop(lambda done: done < count, drop, (tf.constant(0, tf.int64),))


def create_input(
    hooks: Hooks,
    strategy: tf.distribute.Strategy,
    task: Task,
    per_replica: int,
    seed: int,
    accumulate_steps: int = 1,
) -> Input:
    """Creates the training data from ``create_dataset`` and ``make_batches``.

    Where ``make_batches`` leaves the dataset as it is, a pass ends with its last full global
    batch, so that every pass has the same steps on any number of replicas; smaller elements are
    left out. A ``make_batches`` that batches the repeated dataset itself loses no example.

    Args:
        hooks: those two, of which one may name ``input_context`` and shard for itself
        strategy: whose replicas read the data
        task: which of the processes this is
        per_replica: examples in an element
        seed: set again before a pipeline that has been looked into is made anew

    Raises:
        SetupError: what the hooks return is no dataset, empty, too short for one global batch,
            or not batched by ``per_replica`` examples.
    """
    replicas = strategy.num_replicas_in_sync
    context = tf.distribute.InputContext(task.processes, task.index, replicas)
    pipeline = _create_pipeline(hooks, per_replica, context)
    static = static_batch_size(pipeline.dataset)
    length = pipeline.dataset.cardinality()
    if static is not None:
        _check_batch_size(pipeline.hook, static, per_replica, replicas, accumulate_steps)
    if length == tf.data.UNKNOWN_CARDINALITY or (static is None and length != 0):
        found = batch_size_of(_first_element(pipeline.dataset, pipeline.hook))
        _check_batch_size(pipeline.hook, found, per_replica, replicas, accumulate_steps)
        if length == tf.data.INFINITE_CARDINALITY:
            # Iterators of one dataset share its shuffle's random state, and this one may have
            # read ahead into the next pass: the run starts from a dataset that nobody has read.
            keras.utils.set_random_seed(seed)
            pipeline = _create_pipeline(hooks, per_replica, context)
    if length == 0:
        raise SetupError(f"{pipeline.hook.name} ({pipeline.hook.where}): {EMPTY}")
    dataset = _whole_batches(pipeline.dataset, per_replica)
    epoch = None
    if not pipeline.endless:
        # In a pass, each step has all its elements: here, or over all processes.
        together = local_replicas(strategy) if pipeline.sharded else replicas
        epoch = _whole_groups(dataset, together * accumulate_steps, pipeline.hook, per_replica)
        dataset = epoch.repeat()
    if task.processes > 1 and not pipeline.sharded:
        dataset = dataset.shard(task.processes, task.index)
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    return Input(
        strategy,
        local_replicas(strategy),
        dataset,
        iter(dataset),
        epoch,
        pipeline.sharded,
        unsavable(dataset),
        accumulate_steps,
    )


def check_same_data(hooks: Hooks, cluster: Cluster, replicas: int, per_replica: int) -> None:
    """Compares the first element of a cluster's processes, which take their parts of one dataset.

    Where they read different data, in another order say, some examples would be used twice and
    others never. Random numbers have to be seeded again afterwards.

    Raises:
        SetupError: they are not the same.
    """
    task = cluster.task
    if task.processes == 1:
        return
    context = tf.distribute.InputContext(task.processes, task.index, replicas)
    pipeline = _create_pipeline(hooks, per_replica, context)
    if pipeline.sharded:
        return
    digest = hashlib.sha256()
    for tensor in tf.nest.flatten(
        _first_element(pipeline.dataset, pipeline.hook), expand_composites=True
    ):
        digest.update(repr(tensor.numpy().tolist()).encode())
    digests = cluster.exchange([int.from_bytes(digest.digest()[:7], "big")])
    if (digests != digests[0]).any():
        raise SetupError(
            f"{pipeline.hook.name} ({pipeline.hook.where}): the processes of the cluster read "
            "different data, or in a different order, but each takes its part of it; sort lists "
            "of files, seed what is random, or name input_context and shard there."
        )


EMPTY = "returned an empty dataset, or one with fewer examples than one global batch."


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """What the hooks made: one pass, or an endless dataset; and the hook to name in messages."""

    hook: Hook
    dataset: tf.data.Dataset
    endless: bool
    sharded: bool


def _create_pipeline(
    hooks: Hooks, per_replica: int, context: tf.distribute.InputContext
) -> _Pipeline:
    values = {"per_replica_batch_size": per_replica, "input_context": context}
    sharded = any(
        "input_context" in hook.arguments for hook in (hooks.create_dataset, hooks.make_batches)
    )
    first = _dataset_of(hooks.create_dataset, **values)
    repeated = first.repeat()
    made = _dataset_of(hooks.make_batches, dataset=repeated, **values)
    if made is not repeated:
        if made.cardinality() >= 0:
            raise SetupError(
                f"make_batches ({hooks.make_batches.where}): ends after {int(made.cardinality())} "
                "elements; it gets the repeated dataset and must not end."
            )
        return _Pipeline(hooks.make_batches, made, endless=True, sharded=sharded)
    endless = bool(first.cardinality() == tf.data.INFINITE_CARDINALITY)
    return _Pipeline(hooks.create_dataset, first, endless, sharded)


def _check_batch_size(
    hook: Hook, found: int | None, expected: int, replicas: int, accumulate_steps: int
) -> None:
    if found == expected:
        return
    micro = f" and {accumulate_steps} micro-batches" if accumulate_steps > 1 else ""
    raise SetupError(
        f"{hook.name} ({hook.where}): returned "
        + (f"batches of {found} examples" if found is not None else "single examples")
        + f", expected batches of {expected} (batch_size {expected * replicas * accumulate_steps} "
        f"over {replicas} replica{'s' * (replicas > 1)}{micro}): use "
        "dataset.batch(per_replica_batch_size)."
    )


# Stages whose state TensorFlow leaves out of a checkpoint once a stage behind them has drained
# them, and the stages that do so before their own pass ends.
_RESHUFFLING = {"_ShuffleDataset", "_ShuffleAndRepeatDataset", "_RandomDataset"}
_DRAINING = {"_ShuffleDataset", "_ZipDataset", "_ConcatenateDataset"}
# Ops that draw from, or are, a state outside of the pipeline.
_STATEFUL = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless", "RngReadAndSkip"})


def unsavable(dataset: tf.data.Dataset) -> str | None:
    """Says why a saved position of this pipeline would not be exact, or returns None.

    TensorFlow refuses to save a stage with outside state, but only while that stage is at work,
    and forgets how often an earlier stage has reshuffled once a later one has drained it. So the
    stages are looked at here, by ``_inputs`` and ``_functions``, which have no public form;
    tests/engine/test_inputs.py fails if TensorFlow changes them.
    """

    def search(stage: Any, drained: bool) -> str | None:
        name = type(stage).__name__
        for function in stage._functions():
            if found := random_ops(function.function.graph, _STATEFUL):
                return f"it runs {', '.join(found)}, which has a state of its own"
        if drained and name in _RESHUFFLING:
            return (
                "a stage that draws random numbers is followed by a shuffle, zip or concatenate; "
                "with repeat() between the two, it can be"
            )
        if name == "_RepeatDataset" and stage.cardinality() == tf.data.INFINITE_CARDINALITY:
            drained = False
        drained = drained or name in _DRAINING
        return next(filter(None, (search(part, drained) for part in stage._inputs())), None)

    return search(dataset, drained=False)


def create_eval_dataset(hooks: Hooks, task: Task, per_replica: int) -> tf.data.Dataset:
    """Creates this process's part of the evaluation data; the last batch may be smaller.

    Raises:
        SetupError: it is no dataset, empty, or endless.
    """
    hook = hooks.create_eval_dataset
    assert hook is not None
    dataset = _dataset_of(hook, per_replica_batch_size=per_replica)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise SetupError(
            f"{hook.name} ({hook.where}): returned an endless dataset, so an evaluation would "
            "never end; leave out repeat()."
        )
    if batch_size_of(_first_element(dataset, hook)) is None:
        raise SetupError(
            f"{hook.name} ({hook.where}): returned single examples, expected batches: use "
            "dataset.batch(per_replica_batch_size)."
        )
    if task.processes > 1:
        dataset = dataset.shard(task.processes, task.index)
    return dataset.prefetch(tf.data.AUTOTUNE)


def static_batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the batch size if the dataset's own description fixes it, as drop_remainder does."""
    shape = getattr(tf.nest.flatten(dataset.element_spec)[0], "shape", tf.TensorShape(None))
    return shape[0] if shape.rank else None


def batch_size_of(element: Any) -> int | None:
    """Returns how many examples an element holds: the first dimension of its first tensor."""
    size = first_dimension(element)
    return None if size is None else int(size)


def first_dimension(element: Any) -> Any:
    """The same as a number or, in a graph, as a scalar tensor; None for a scalar element."""
    tensor = tf.nest.flatten(element)[0]
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows()
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    if tensor.shape.rank == 0:
        return None
    static = None if tensor.shape.rank is None else tensor.shape[0]
    return tf.shape(tensor, tf.int64)[0] if static is None else static


def _dataset_of(hook: Hook, **values: Any) -> tf.data.Dataset:
    dataset = hook(**values)
    if not isinstance(dataset, tf.data.Dataset):
        raise SetupError(
            f"{hook.name} ({hook.where}): returned {_kind(dataset)}, expected a tf.data.Dataset."
        )
    return dataset


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _first_element(dataset: tf.data.Dataset, hook: Hook) -> Any:
    iterator: Iterator[Any] = iter(dataset.take(1))
    try:
        return next(iterator)
    except StopIteration:
        raise SetupError(
            f"{hook.name} ({hook.where}): returned an empty dataset; there is nothing to read."
        ) from None
    except tf.errors.OpError as error:
        raise SetupError(
            f"{hook.name} ({hook.where}): reading the first element failed: {brief(error)}"
        ) from error


def _whole_batches(dataset: tf.data.Dataset, per_replica: int) -> tf.data.Dataset:
    """Leaves out elements of another size than a batch, such as the remainder of a pass."""
    if static_batch_size(dataset) is not None:
        return dataset

    def is_whole(*element: Any) -> tf.Tensor:
        return tf.equal(tf.cast(first_dimension(element), tf.int64), per_replica)

    return dataset.filter(is_whole)


def _whole_groups(
    dataset: tf.data.Dataset, size: int, hook: Hook, per_replica: int
) -> tf.data.Dataset:
    """Leaves out the last elements of a pass, those that fill no group of ``size``."""
    elements = int(dataset.cardinality())
    if size == 1 or elements == tf.data.INFINITE_CARDINALITY:
        return dataset
    if elements == tf.data.UNKNOWN_CARDINALITY:
        # An element passes once its whole group has been seen: only a full window has an element
        # after skip(size - 1), which then yields the window.
        return dataset.group_by_window(
            key_func=lambda *_: tf.constant(0, tf.int64),
            reduce_func=lambda _, window: window.skip(size - 1).take(1).flat_map(lambda *_: window),
            window_size=size,
        )
    if elements < size:
        raise SetupError(
            f"{hook.name} ({hook.where}): the dataset has {elements * per_replica} examples, fewer "
            f"than one global batch of {size * per_replica}; lower batch_size."
        )
    whole = elements - elements % size
    return dataset if whole == elements else dataset.take(whole)
