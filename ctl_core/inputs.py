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

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.autograph import is_default
from ctl_core.checks.data import check_made_anew, look
from ctl_core.checks.position import why_not_saved
from ctl_core.cluster.strategy import distribute, local_replicas
from ctl_core.cluster.sync import Cluster
from ctl_core.compat import is_deterministic
from ctl_core.console import Console
from ctl_core.hooks import Hooks
from ctl_core.last_batch import kept, whole_passes
from ctl_core.passes import Tally, cut, on_host, tallied, timed, whole_groups
from ctl_core.pipeline import Found, Pipeline, Sizes, create_pipeline, known, uneven
from ctl_core.settings import Config
from ctl_core.units import Units, begin


@dataclasses.dataclass
class Input:
    """The endless stream of replica batches of this process.

    Attributes:
        strategy: deals the batches out
        replicas: how many replicas this process has
        sizes: how they share a global batch
        pipeline: what the hooks made
        found: what was found out about it before
        iterator: its position; part of every checkpoint; ``Units`` or an iterator of tf.data
        element_spec: of one replica's batch
        rows: how many each tensor of an element has, if examples are counted so
        why_not_checkpointable: why the position cannot be saved exactly, or None
        tally: of what a pass leaves out
        counted: examples drawn for steps, where the last batch of a pass is kept, else None
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
    rows: int | None
    why_not_checkpointable: str | None
    tally: Tally
    counted: tf.Variable | None
    clock: bool
    waited: tf.Variable = dataclasses.field(default_factory=lambda: on_host(0.0, "waited"))
    watched: int = 0

    def next_batch(self, watch: bool, index: Any = None) -> Any:
        """Draws the next element for each local replica; runs inside a graph function.

        Args:
            watch: whether to add to ``waited`` and to note the tally (some ten microseconds)
            index: of the micro-batch; here they are drawn in turn, whatever it is
        """
        values = self.timed(watch, lambda: [next(self.iterator) for _ in range(self.replicas)])
        if self.tally.variable is not None:
            if watch:
                self.tally.variable.assign(values[-1][1])
            values = [self.untagged(value) for value in values]
        if self.counted is not None:
            self.counted.assign_add(values[0][0][1])
        return distribute(self.strategy, values)

    def timed(self, watch: bool, draw: Callable[[], Any]) -> Any:
        """Returns what ``draw`` does; adds the time that it takes to ``waited`` if asked for."""
        return timed(draw, self.waited) if watch and self.clock else draw()

    def untagged(self, value: Any) -> Any:
        """Returns the element of what the iterator gives, which may carry counts as well."""
        return value[-1] if self.tally.variable is not None or self.counted is not None else value

    @property
    def unit(self) -> int:
        """How many elements are read at once; 0 if they are read one by one."""
        return self.iterator.number if isinstance(self.iterator, Units) else 0

    def seconds_waited(self, steps: int) -> float | None:
        """How long so many steps have waited for their elements, as far as the watched ones tell.

        Returns:
            None if none was watched.
        """
        if not (self.watched and self.clock):
            return None
        return float(self.waited.numpy()) / self.watched * steps

    def examples_in(self, steps: int) -> int:
        """How many examples the last steps had, so many of them, since it was last asked."""
        if self.pipeline.stream is not None:
            self.pipeline.stream.took(steps)
        if self.counted is None:
            return steps * self.sizes.batch
        examples = int(self.counted.numpy())
        self.counted.assign(0)
        return examples

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in a pass, or None: it has no end, or the steps were not counted."""
        return self.found.steps


def create_input(
    hooks: Hooks,
    strategy: tf.distribute.Strategy,
    cluster: Cluster,
    config: Config,
    console: Console | None = None,
    before: Input | None = None,
) -> Input:
    """Creates the training data from ``create_dataset`` and ``make_batches``.

    Where ``make_batches`` leaves the dataset as it is, a pass ends with its last full global
    batch, so that every pass has the same steps on any number of replicas; smaller elements are
    left out, unless ``last_batch`` is keep. A ``make_batches`` that batches the repeated dataset
    itself loses no example.

    The two hooks are called once if the datasets' descriptions say all there is to know, and twice
    if something has to be read to find it out.

    Args:
        hooks: those two, of which one may name ``input_context`` and shard for itself
        strategy: whose replicas read the data
        cluster: its processes compare the first element, if they take parts of one dataset
        config: sizes and the seed, which is set before each time that the hooks are called
        console: for warnings
        before: what an earlier call returned; nothing is looked at then

    Raises:
        SetupError: what the hooks return is no dataset, empty, too short for one global batch,
            or not batched as it should be; or the processes read different data.
    """
    task = cluster.task
    sizes = Sizes(
        config.batch_size, strategy.num_replicas_in_sync, config.accumulate_steps, task.processes
    )
    context = tf.distribute.InputContext(task.processes, task.index, sizes.replicas)

    def create(before: Pipeline | None) -> Pipeline:
        keras.utils.set_random_seed(config.seed)
        return create_pipeline(hooks, sizes, context, before)

    pipeline = create(before.pipeline if before else None)
    found = before.found if before else None
    keeping = config.keeps_last_batch and not pipeline.endless
    if found is None:
        found = known(pipeline, sizes)
        compared = task.processes > 1 and not pipeline.sharded
        if found is None or compared or uneven(pipeline, found.together):
            counting = config.counts_epochs and not pipeline.endless
            others = cluster if compared else None
            found = look(pipeline, sizes, others, counting, console, keeping)
            looked_at, pipeline = pipeline, create(pipeline)
            check_made_anew(looked_at, pipeline)
        found = kept(found, pipeline, sizes, hooks, cluster, console) if keeping else found
    dataset, stream = pipeline.dataset, pipeline.stream
    with_tally = found.kept is None and stream is None and known(pipeline, sizes) is None
    if found.kept is not None:
        dataset = whole_passes(pipeline, found, sizes)
    elif stream is not None:
        dataset = stream.in_steps(found.size, found.together, found.elements, False)
    elif with_tally:
        dataset = tallied(pipeline, found)
    elif not pipeline.endless:
        dataset = whole_groups(pipeline, found).repeat()
    if found.kept is None and found.size != sizes.per_replica:
        dataset = cut(dataset, sizes, with_tally, pipeline.name)
    if task.processes > 1 and not pipeline.sharded:
        dataset = dataset.shard(task.processes, task.index)
    if n := config.overfit_batches:
        # Kept as they were read first: neither a shuffle nor noise makes others of them.
        dataset = dataset.take(n * sizes.shares // sizes.processes).cache().repeat()
        found = dataclasses.replace(found, elements=n * found.together, left_out=(0, 0, 0))
    stuck = why_not_saved(pipeline, config.overfit_batches)
    rows = sizes.per_replica if is_default(pipeline.count_examples.function) else None
    alone = sizes.replicas == 1 and not (keeping or stuck or stream)
    return Input(
        strategy,
        local_replicas(strategy),
        sizes,
        pipeline,
        found,
        begin(dataset, rows, sizes.accumulate_steps * (alone and config.jit_compile)),
        dataset.element_spec[-1] if with_tally or found.kept else dataset.element_spec,
        rows,
        stuck,
        Tally(pipeline, found, sizes, with_tally),
        None if found.kept is None else on_host(0, "counted"),
        clock=not is_deterministic(),
    )
