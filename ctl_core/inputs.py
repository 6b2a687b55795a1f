"""The training data: from the user's dataset to one value per replica, drawn inside the graph.

A process reads one plain tf.data iterator, which a checkpoint can hold, and deals its elements
out to the local replicas in turn. In a cluster of P processes, process p takes every P-th element
from the p-th on. The N replicas of a step thus get the examples that one device would get with
the whole batch: a run does not depend on N.

Iterators of one dataset share the state of its shuffles, so a second one would not read what the
first did. Whatever has to be found out by reading is found out on a pipeline of its own, before;
the run reads one that is made anew from the same seed, as a plain loop over it would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checks.data import (
    Found,
    Pipeline,
    Sizes,
    check_made_anew,
    checked_count,
    create_pipeline,
    dataset_of,
    examples_in,
    first_of,
    known,
    look,
    packed,
    reading,
    uneven,
)
from ctl_core.checks.position import unsavable
from ctl_core.cluster.sync import Cluster
from ctl_core.compat import is_deterministic
from ctl_core.console import Console
from ctl_core.errors import SetupError
from ctl_core.hooks import Hooks, describe
from ctl_core.settings import Config


@dataclasses.dataclass
class Input:
    """The endless stream of replica batches of this process.

    Attributes:
        strategy: deals the batches out
        replicas: how many replicas this process has
        sizes: how they share a global batch
        pipeline: what the hooks made
        found: what was found out about it before
        iterator: its position; part of every checkpoint
        element_spec: of one replica's batch
        unsavable: why the position cannot be saved exactly, or None
        tally: where elements carry it, that of the last watched step; see ``_tallied``
        clock: whether there is one in the graph; not where ops are deterministic
        waited: seconds that watched steps have waited for elements, a float64 scalar
        watched: how many steps that are
    """

    strategy: tf.distribute.Strategy
    replicas: int
    sizes: Sizes
    pipeline: Pipeline
    found: Found
    iterator: Any
    element_spec: Any
    unsavable: str | None
    tally: tf.Variable | None
    clock: bool
    waited: tf.Variable = dataclasses.field(default_factory=lambda: _variable("waited", 0.0))
    watched: int = 0
    _told: bool = False

    def draw(self, watch: bool) -> Any:
        """Draws the next element for each local replica; runs inside a graph function.

        Args:
            watch: whether to add to ``waited`` and to note the tally, which costs some ten
                microseconds
        """
        start = tf.timestamp() if watch and self.clock else None
        with tf.control_dependencies([] if start is None else [start]):
            values = [next(self.iterator) for _ in range(self.replicas)]
        if start is not None:
            with tf.control_dependencies(tf.nest.flatten(values, expand_composites=True)):
                self.waited.assign_add(tf.timestamp() - start)
        if self.tally is not None:
            if watch:
                self.tally.assign(values[-1][1])
            values = [element for _, _, element in values]
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

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in a pass, or None: it has no end, or the steps were not counted."""
        elements = self.found.elements
        return None if elements is None else elements // self.found.together

    def say_left_out(self, console: Console, ended: bool = False) -> None:
        """Says what a pass leaves out: once, when that is known.

        Args:
            console: where
            ended: training has, so that no more will be known; if no step was watched, the next
                element is drawn for its tally
        """
        if self._told or (self.found.left_out is None and self.tally is None):
            return
        passes, left_out = 2, self.found.left_out
        if left_out is None:
            assert self.tally is not None
            if ended and not self.watched:
                with contextlib.suppress(tf.errors.OpError, StopIteration):
                    self.tally.assign(next(self.iterator)[1])
            passes, odd, odd_examples, tail = self.tally.numpy().tolist()
            left_out = odd, odd_examples, tail
        if passes < 2 and not ended:
            return
        self._told = True
        odd, odd_examples, tail = left_out
        start = f"{self.pipeline.name}: a pass{'' if passes > 1 else ', so far,'} leaves out"
        end = f"which fill no global batch of {self.sizes.batch}."
        if odd > 1 or odd_examples > self.found.size:
            console.warn(
                f"{start} {odd_examples} examples in {odd} elements that do not hold "
                f"{self.found.size} each" + (f", and {tail} examples, {end}" if tail else ".")
            )
        elif odd_examples + tail:
            console.say(f"{start} {odd_examples + tail} examples, {end}")


def _variable(name: str, value: Any) -> tf.Variable:
    with tf.device("CPU:0"):
        dtype = tf.float64 if isinstance(value, float) else tf.int64
        return tf.Variable(value, dtype=dtype, trainable=False, name=name)


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
    cluster: Cluster,
    config: Config,
    console: Console | None = None,
    found: Found | None = None,
) -> Input:
    """Creates the training data from ``create_dataset`` and ``make_batches``.

    Where ``make_batches`` leaves the dataset as it is, a pass ends with its last full global
    batch, so that every pass has the same steps on any number of replicas; smaller elements are
    left out. A ``make_batches`` that batches the repeated dataset itself loses no example.

    The two hooks are called once if the datasets' descriptions say all there is to know, and twice
    if something has to be read to find it out.

    Args:
        hooks: those two, of which one may name ``input_context`` and shard for itself
        strategy: whose replicas read the data
        cluster: its processes compare the first element, if they take parts of one dataset
        config: sizes and the seed, which is set before each time that the hooks are called
        console: for warnings
        found: by an earlier call; nothing is looked at then

    Raises:
        SetupError: what the hooks return is no dataset, empty, too short for one global batch,
            or not batched as it should be; or the processes read different data.
    """
    task = cluster.task
    sizes = Sizes(
        config.batch_size, strategy.num_replicas_in_sync, config.accumulate_steps, task.processes
    )
    context = tf.distribute.InputContext(task.processes, task.index, sizes.replicas)

    def create() -> Pipeline:
        keras.utils.set_random_seed(config.seed)
        return create_pipeline(hooks, sizes, context)

    pipeline = create()
    if found is None:
        found = known(pipeline, sizes)
        compared = task.processes > 1 and not pipeline.sharded
        if found is None or compared or uneven(pipeline, found.together):
            counting = config.epochs is not None and not pipeline.endless
            found = look(pipeline, sizes, cluster if compared else None, counting, console)
            looked_at, pipeline = pipeline, create()
            check_made_anew(looked_at, pipeline)
    dataset = pipeline.dataset
    tallied = known(pipeline, sizes) is None
    if tallied:
        dataset = _tallied(pipeline, found)
    elif not pipeline.endless:
        dataset = _whole_groups(pipeline, found).repeat()
    if found.size != sizes.per_replica:
        dataset = _cut(dataset, sizes, tallied, pipeline.name)
    if task.processes > 1 and not pipeline.sharded:
        dataset = dataset.shard(task.processes, task.index)
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    return Input(
        strategy,
        local_replicas(strategy),
        sizes,
        pipeline,
        found,
        iter(dataset),
        dataset.element_spec[-1] if tallied else dataset.element_spec,
        unsavable(pipeline.dataset.repeat()),
        _variable("tally", [0] * 4) if tallied else None,
        clock=not is_deterministic(),
    )


def _whole_groups(pipeline: Pipeline, found: Found) -> tf.data.Dataset:
    """Leaves out the last elements of a pass, those that fill no step."""
    assert found.elements is not None
    if found.elements < found.together:
        raise SetupError(
            f"{pipeline.name}: the dataset has {found.elements * found.size} examples, fewer than "
            f"one global batch of {found.together * found.size}; lower batch_size."
        )
    rest = found.elements % found.together
    return pipeline.dataset.take(found.elements - rest) if rest else pipeline.dataset


def _tallied(pipeline: Pipeline, found: Found) -> tf.data.Dataset:
    """Repeats a pass without the elements that cannot be used, and keeps a tally of these.

    A counter in the pipeline that the host could read would be a state that no checkpoint can
    hold. So the tally travels with the elements, in the state of ``scan``, which one can.

    Returns:
        A dataset of (True, tally, element). The tally is an int64 vector: how many passes have
        begun, and of the first pass ``Found.left_out`` up to this element.
    """
    size, dataset = found.size, pipeline.dataset
    grouped = found.together > 1 and not pipeline.endless

    @tf.autograph.experimental.do_not_convert
    def has_size(*parts: Any) -> tf.Tensor:
        number = checked_count(pipeline.count_examples, packed(pipeline.dataset, parts))
        return tf.cast(number == size, tf.int64)

    def group(key: tf.Tensor, window: tf.data.Dataset) -> tf.data.Dataset:
        # An element is used if it has the right size and a whole group is there. (The window is
        # counted as a batch, since ``Dataset.reduce`` cannot be saved.)
        lengths = window.map(lambda *_: 0).batch(found.together).map(tf.size)

        def mark(length: tf.Tensor) -> tf.data.Dataset:
            used = tf.logical_and(key == 1, length == found.together)
            return window.map(lambda *parts: (used, packed(pipeline.dataset, parts)))

        return lengths.flat_map(mark)

    @tf.autograph.experimental.do_not_convert
    def add(state: tf.Tensor, item: Any) -> tuple[tf.Tensor, Any]:
        index, (used, element) = item if grouped else (item[0], (True, item[1]))
        number = checked_count(pipeline.count_examples, element)
        used = tf.logical_and(used, number == size)
        begun, odd, unused = (tf.cast(x, tf.int64) for x in (index == 0, number != size, ~used))
        passes = state[0] + begun
        counts = tf.stack([odd, odd * number, (1 - odd) * unused * number])
        counts = tf.where(passes < 2, state[1:4] + counts, state[1:4])
        # Passes begun since an element was used: a pass that uses none would go on for ever.
        idle = tf.where(used, tf.constant(0, tf.int64), state[4] + begun)
        tally = tf.concat([[passes], counts], 0)
        return tf.concat([tally, [idle]], 0), (used, idle < 2, tally, element)

    # No stage of a pass reads ahead here, as map may: at the end of a pass TensorFlow lets go of
    # a shuffle whose state is still wanted (see ``holds_shuffles``).
    if grouped:
        dataset = dataset.group_by_window(
            has_size,
            group,
            window_size_func=lambda key: tf.where(
                key == 1, tf.constant(found.together, key.dtype), 1
            ),
        )
    dataset = dataset.enumerate()
    dataset = dataset if pipeline.endless else dataset.repeat()
    dataset = dataset.scan(tf.zeros([5], tf.int64), add)
    dataset = dataset.take_while(lambda used, going_on, *_: going_on)
    return dataset.filter(lambda used, *_: used).map(lambda used, _, *rest: (used, *rest))


def _cut(dataset: tf.data.Dataset, sizes: Sizes, tallied: bool, name: str) -> tf.data.Dataset:
    """Cuts global batches into the shares that the replicas take one after the other."""

    def share(tensor: Any, index: tf.Tensor) -> Any:
        if tensor.shape.rank == 0:
            return tensor
        if tensor.shape[0] not in (None, sizes.batch) or isinstance(tensor, tf.SparseTensor):
            raise SetupError(
                f"{name}: a global batch cannot be cut into batches of {sizes.per_replica}, since "
                f"not all of it has {sizes.batch} rows, such as {describe(tensor)}; return batches "
                "of per_replica_batch_size."
            )
        start = tf.cast(index, tf.int32) * sizes.per_replica
        part = tensor[start : start + sizes.per_replica]
        if isinstance(part, tf.RaggedTensor):
            return part
        return tf.ensure_shape(part, [sizes.per_replica, *tensor.shape[1:]])

    @tf.autograph.experimental.do_not_convert
    def cut(*parts: Any) -> tf.data.Dataset:
        *front, element = parts if tallied else (packed(dataset, parts),)

        def pick(index: tf.Tensor) -> Any:
            own = tf.nest.map_structure(lambda tensor: share(tensor, index), element)
            return (*front, own) if tallied else own

        return tf.data.Dataset.range(sizes.shares).map(
            tf.autograph.experimental.do_not_convert(pick)
        )

    return dataset.flat_map(cut)


@dataclasses.dataclass(frozen=True)
class EvaluationData:
    """The evaluation data, which every evaluation reads from their start.

    Attributes:
        dataset: one pass; element = (number of examples, batch)
    """

    dataset: tf.data.Dataset
    _start: tempfile.TemporaryDirectory[str] | None

    def __iter__(self) -> Any:
        """Returns an iterator that reads what the first did: shuffles have the same order again.

        A resumed run thus evaluates on what the whole run does. Where a stage has a state that
        cannot be saved, shuffles go on to other orders.
        """
        iterator = iter(self.dataset)
        if self._start is not None:
            tf.train.Checkpoint(iterator=iterator).read(str(Path(self._start.name) / "start"))
        return iterator


def create_eval_dataset(hooks: Hooks, per_replica: int) -> EvaluationData:
    """Creates the evaluation data, of all processes; the last batch may be smaller.

    Raises:
        SetupError: it is no dataset, empty, or endless.
    """
    hook = hooks.create_eval_dataset
    assert hook is not None
    made = dataset_of(hook, per_replica_batch_size=per_replica)
    if made.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise SetupError(
            f"{hook.name} ({hook.where}): returned an endless dataset, so an evaluation would "
            "never end; leave out repeat()."
        )

    @tf.autograph.experimental.do_not_convert
    def count(*parts: Any) -> tuple[tf.Tensor, Any]:
        batch = packed(made, parts)
        return checked_count(hooks.count_examples, batch), batch

    dataset = made.map(count).prefetch(tf.data.AUTOTUNE)
    start = tempfile.TemporaryDirectory(prefix="ctl_core-")
    data = EvaluationData(dataset, start)
    try:
        tf.train.Checkpoint(iterator=iter(dataset)).write(str(Path(start.name) / "start"))
    except tf.errors.FailedPreconditionError:
        data = EvaluationData(dataset, None)
    with reading(hook):
        if examples_in(hooks.count_examples, first_of(iter(made), hook)) is None:
            raise SetupError(
                f"{hook.name} ({hook.where}): returned single examples, expected batches: use "
                "dataset.batch(per_replica_batch_size)."
            )
    return data
