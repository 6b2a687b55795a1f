"""Evaluates a model: each example counts exactly once, and training does not notice.

Replicas take the same shares of a batch as in training. A replica that has no rows of the last
batch computes on a placeholder, which counts nowhere. Variables that an evaluation writes get
their values back afterwards. The values of an evaluation are compared in criteria.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ctl_core.cluster.collectives import (
    all_reduce,
    count_local_replicas,
    find_offset_in_share,
    place_rows,
)
from ctl_core.cluster.replica_contexts import enter_logical_replica, weigh_by_rows
from ctl_core.cluster.sync import LoopStatus
from ctl_core.compat import (
    add_called_ops,
    get_seed_generator,
    is_shuffle,
    list_stages,
    run_layers,
    run_replica,
)
from ctl_core.hooks.defaults import find_sample_weight, note_weighted
from ctl_core.hooks.hooks import Hook
from ctl_core.hooks.recording import Recording, read_flags
from ctl_core.input.batches import (
    Share,
    add_to_digest,
    count_rows,
    distribute_shares,
    find_first_replica,
    has_varying_widths,
    take_share,
)
from ctl_core.input.caches import refuse_unfinished_caches
from ctl_core.input.prefetch import read_ahead
from ctl_core.input.readers import open_reader
from ctl_core.input.sharing import may_have_rows, reject_elements
from ctl_core.model.components import Components, ForwardContext, TraceContext
from ctl_core.model.copies import ReplicaCopies
from ctl_core.model.forward import compute_loss, run_model, sum_loss, weigh_batch
from ctl_core.model.logical_replicas import (
    EVALUATION,
    DeviceResult,
    GeneratorStates,
    LeafResult,
    LeafSum,
)
from ctl_core.model.metrics import read_results, update_if, update_metrics
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.numerics.variables import unwrap
from ctl_core.run.listeners import FILE, RESERVED
from ctl_core.run.settings import Config
from ctl_core.schedule import StepsPerCall
from ctl_core.types import Batch, BatchSpec, Count, GraphFunction, PerReplica

# The name of the evaluation data if ``create_eval_dataset`` returns no dict.
SINGLE_SET = ""
# The most batches of a graph call; StepsPerCall learns how many take about a second.
MOST_BATCHES = 100_000

Sync = Callable[[LoopStatus], LoopStatus]


@dataclasses.dataclass
class EvaluationSet:
    """A set of evaluation data with its metrics, and the graph function that updates them.

    Attributes:
        make: returns the dataset, which has the same elements in the same order each time
        spec: the specification of its elements
        metrics: the metrics of ``create_metrics`` by name
        total: the sum of the losses, in float64
        examples: the number of examples that the loss is divided by, or their weight, in float64
        exchanges: whether replicas exchange values while they evaluate a batch
        run_steps: evaluates batches, see ``define_run_steps``; None before it is traced
        copies: of the variables that the evaluation writes; None before it is traced
        batches: counts the batches, if there are logical replicas
        written: the other variables that logical replicas write
        names: the names of the metrics' values, once the metrics are built
        is_weighted: whether ``eval_pre`` multiplies the loss by the sample weights of the batch
        weight: the sum of the absolute sample weights in the last evaluation, if it is weighted
    """

    make: Callable[[], tf.data.Dataset]
    spec: BatchSpec
    metrics: dict[str, keras.Metric]
    total: keras.Metric
    examples: keras.Metric
    exchanges: bool = False
    run_steps: GraphFunction | None = None
    copies: ReplicaCopies | None = None
    batches: keras.metrics.Metric | None = None
    written: list[tf.Variable] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    is_weighted: bool = False
    weight: float = 0.0

    @property
    def accumulators(self) -> list[keras.Metric]:
        """The metrics and sums that are reset before each evaluation."""
        if self.batches is None:
            return self.sums
        return [*self.sums, self.batches]

    @property
    def sums(self) -> list[keras.Metric]:
        """The metrics and sums that logical replicas add to."""
        return [*self.metrics.values(), self.total, self.examples]


class Evaluation:
    """Evaluates all sets of evaluation data, each with its own graph and metrics.

    Attributes:
        sets: the sets by name; a single one is under ``SINGLE_SET``
        arrays: the results of the last evaluation that are not scalars, such as a confusion matrix
        problem: why the values of the last evaluation mean nothing; "" if they do
    """

    def __init__(
        self, components: Components, recording: Recording, sets: dict[str, EvaluationSet]
    ) -> None:
        self.sets = sets
        self.arrays: dict[str, np.ndarray] = {}
        self.problem = ""
        self._components = components
        self._recording = recording
        self._frozen: list[bool] | None = None

    @property
    def names(self) -> list[str]:
        """The names of the values: ``loss``, or ``NAME/loss`` if the sets have names."""
        return [
            _name_value(set_name, name)
            for set_name, evaluation_set in self.sets.items()
            for name in ("loss", *evaluation_set.names)
        ]

    def list_passing_variables(self) -> list[tf.Variable]:
        """Returns the variables that each evaluation resets, so that no checkpoint needs them."""
        return [
            unwrap(variable)
            for evaluation_set in self.sets.values()
            for metric in evaluation_set.accumulators
            for variable in metric.variables
        ]

    def trace(self) -> None:
        """Traces the graphs without running them.

        Does nothing if they are traced for the layers that are frozen now. (Frozen layers have no
        regularization losses.)
        """
        frozen = read_flags(self._recording)
        if frozen == self._frozen:
            return
        self._frozen = frozen
        for evaluation_set in self.sets.values():
            evaluation_set.exchanges = False
            evaluation_set.written = []
            graph = self._trace_set(evaluation_set)
            # Only a trace tells what else logical replicas write, each of which starts alike.
            if self._components.shape.logical_replicas is not None:
                self._refuse_states(evaluation_set)
                generators = set(map(id, self._components.generators.variables))
                written = self._list_written(graph)
                evaluation_set.written = [v for v in written if id(v) not in generators]
                if evaluation_set.written:
                    graph = self._trace_set(evaluation_set)
            # Only a trace tells whether hooks or layers exchange values between replicas. If they
            # do, every step has to ask first whether each process has a batch.
            if _has_collectives(graph):
                evaluation_set.exchanges = True
                graph = self._trace_set(evaluation_set)
            evaluation_set.copies = self._copy_written_variables(graph)

    def _trace_set(self, evaluation_set: EvaluationSet) -> tf.Graph:
        """Traces the graph function of a set; returns its graph."""
        evaluation_set.run_steps = define_run_steps(self._components, evaluation_set)
        return evaluation_set.run_steps.get_concrete_function().graph

    def list_graphs(self) -> list[tf.Graph]:
        """Returns the graphs that ``trace`` has traced, one for each set."""
        return [
            evaluation_set.run_steps.get_concrete_function().graph
            for evaluation_set in self.sets.values()
            if evaluation_set.run_steps is not None
        ]

    def _copy_written_variables(self, graph: tf.Graph) -> ReplicaCopies:
        """Creates copies of the variables that an evaluation writes and that training reads.

        Metrics keep their values, so that hooks can read them after the evaluation.
        """
        return ReplicaCopies(self._components.strategy, self._list_written(graph))

    def _list_written(self, graph: tf.Graph) -> list[tf.Variable]:
        """Returns the variables that an evaluation writes, without those of metrics."""
        passing = {id(variable) for variable in self.list_passing_variables()}
        written = self._recording.find_written(graph, self._components.strategy)
        return [variable for variable in written if id(variable) not in passing]

    def _refuse_states(self, evaluation_set: EvaluationSet) -> None:
        """Refuses metrics whose state does not start at 0, and so is no sum.

        Raises:
            SetupError: there is one; the message names it.
        """
        for name, metric in evaluation_set.metrics.items():
            metric.reset_state()
            if any(np.any(np.asarray(variable) != 0) for variable in metric.variables):
                raise self._components.hooks.create_metrics.reject(
                    f"the state of the metric '{name}' does not start at 0, so logical replicas "
                    "cannot add it up; leave out the metric or logical_replicas."
                )

    def _find_problem(self, set_name: str, evaluation_set: EvaluationSet) -> str:
        """Returns why the values of a set mean nothing; "" if they do."""
        counted = float(evaluation_set.examples.result())
        lacks_weight = evaluation_set.is_weighted and evaluation_set.weight == 0
        if counted > 0 and not lacks_weight:
            return ""
        hooks = self._components.hooks
        where = ""
        if set_name != SINGLE_SET:
            where = f" of the set '{set_name}'"
        if counted > 0:
            return (
                f"{hooks.create_eval_dataset}: the sample weights of all examples{where} are 0 or "
                "NaN, so the values of an evaluation mean nothing; return positive weights."
            )
        if hooks.batch_weight is not None:
            return (
                f"{hooks.batch_weight}: the weights of all batches{where} add up to {counted:g}, "
                "so an evaluation has no mean loss; return what each batch counts."
            )
        return (
            f"{hooks.create_eval_dataset}: an evaluation{where} counts {counted:g} examples, so "
            "its values mean nothing; return a dataset with examples."
        )

    def evaluate(self, sync: Sync = lambda status: status) -> dict[str, float] | None:
        """Evaluates each set of evaluation data once.

        Args:
            sync: is called about once a second, and in a cluster returns what all processes agree
                on; a signal in the returned status ends the evaluation early

        Returns:
            The values that ``names`` lists. A loss is the mean over the examples, or over the
            weights of batches. None if the evaluation ended early. If nothing was counted,
            ``problem`` says so.
        """
        self.trace()
        self.problem = ""
        values: dict[str, float] = {}
        self.arrays = {}
        for set_name, evaluation_set in self.sets.items():
            assert evaluation_set.copies is not None
            with evaluation_set.copies.put_back_after():
                is_complete = add_all_batches(evaluation_set, sync)
                if not is_complete:
                    return None
                values[_name_value(set_name, "loss")] = _read_mean_loss(evaluation_set)
                self.problem = self.problem or self._find_problem(set_name, evaluation_set)
                results = read_results(evaluation_set.metrics)
            for name, scalar in results.scalars.items():
                values[_name_value(set_name, name)] = scalar
            for name, array in results.arrays.items():
                self.arrays[_name_value(set_name, name)] = array
        return values


def _name_value(set_name: str, name: str) -> str:
    """Returns ``loss`` for the loss of a single set, ``NAME/loss`` for that of a set NAME."""
    if set_name == SINGLE_SET:
        return name
    return f"{set_name}/{name}"


def _has_collectives(graph: tf.Graph) -> bool:
    """Returns whether replicas exchange values in a graph."""
    operations = add_called_ops(graph.get_operations())
    return any(op.type.startswith("Collective") for op in operations)


def add_all_batches(evaluation_set: EvaluationSet, sync: Sync) -> bool:
    """Resets a set's metrics and sums and adds all batches; returns False if it ended early."""
    assert evaluation_set.run_steps is not None
    for metric in evaluation_set.accumulators:
        metric.reset_state()
    evaluation_set.weight = 0.0
    iterator = iter(evaluation_set.make())
    # Within a graph call, a collective between processes requires the shapes of its first step.
    most = 1 if evaluation_set.exchanges else MOST_BATCHES
    steps_per_call = StepsPerCall(most)
    while True:
        with steps_per_call.measure(steps_per_call.limit) as steps:
            progress = evaluation_set.run_steps(iterator, tf.constant(steps, tf.int64))
            has_more = bool(progress.has_more)
        evaluation_set.weight += float(progress.weight)
        status = sync(LoopStatus(steps_per_call=steps_per_call.limit, data=int(progress.digest)))
        steps_per_call.limit = status.steps_per_call
        if not has_more:
            return True
        if status.signal:
            return False


def _read_mean_loss(evaluation_set: EvaluationSet) -> float:
    """Returns the mean loss after an evaluation; NaN if there were no examples."""
    examples = float(evaluation_set.examples.result())
    if examples == 0:
        return math.nan
    return float(evaluation_set.total.result()) / examples


def create_evaluation(
    components: Components, config: Config, recording: Recording
) -> Evaluation | None:
    """Creates the evaluation by ``create_eval_dataset`` and ``create_metrics``.

    Returns:
        The evaluation, or None without ``create_eval_dataset``.

    Raises:
        SetupError: a hook returned data that cannot be evaluated, or there is an ``after_eval``
            without evaluation data.
    """
    hooks = components.hooks
    if hooks.create_eval_dataset is None:
        if hooks.after_eval:
            raise hooks.after_eval[0].reject(
                "there is no evaluation that it could run after; write create_eval_dataset."
            )
        return None
    data = EvaluationData(components, config, hooks.create_eval_dataset)
    sets = {name: data.create_set(name, returned) for name, returned in data.call_hook().items()}
    return Evaluation(components, recording, sets)


def find_wrong_name(metrics: dict[str, keras.Metric]) -> str | None:
    """Returns which name of a metric cannot be used, and why; None if all can.

    In metrics.jsonl, names stand beside the keys in ``RESERVED``.
    """
    names_by_metric: dict[int, str] = {}
    for name, metric in metrics.items():
        if not name or not name.isprintable():
            return f"names a metric {name!r}; give it a name of printable characters."
        if name in RESERVED:
            return f"names a metric '{name}', which each line of {FILE} has; give it another name."
        other = names_by_metric.setdefault(id(metric), name)
        if other != name:
            return f"returned one metric as '{other}' and as '{name}'; create one for each name."
    return None


class EvaluationData:
    """Reads the evaluation data of ``create_eval_dataset``."""

    def __init__(self, components: Components, config: Config, hook: Hook) -> None:
        """``hook`` is ``create_eval_dataset``."""
        self._components = components
        self._config = config
        self._hook = hook
        self._batch_size = config.eval_batch_size or components.shape.batch

    def call_hook(self) -> dict[str, Any]:
        """Calls ``create_eval_dataset``, with the same seed each time.

        Returns:
            By name the datasets, or other objects to read; a single one is under ``SINGLE_SET``.
        """
        size = self._batch_size
        if not self._components.shape.by_rows:  # each element is the share of a replica
            size = max(1, size // self._components.shape.replicas)
        with keep_seeds():
            keras.utils.set_random_seed(self._config.seed)
            returned = self._hook(global_batch_size=size, per_replica_batch_size=size)
        if isinstance(returned, dict):
            return returned
        return {SINGLE_SET: returned}

    def create_set(self, name: str, returned: Any) -> EvaluationSet:
        """Creates the set of a dataset, or of another object, that the hook has returned."""
        hook = self._hook
        if name != SINGLE_SET:
            hook = dataclasses.replace(hook, name=f"{hook.name}['{name}']")
        reader = open_reader(hook, returned, lambda: self.call_hook()[name])
        if reader is not None:
            returned = reader.read(goes_on=False)
        spec = returned.element_spec
        if self._components.shape.by_rows and not may_have_rows(spec):
            raise reject_elements(hook, spec)
        dataset = self._prepare(hook, returned)
        refuse_unfinished_caches(hook, dataset)
        is_shuffled = any(map(is_shuffle, list_stages(dataset)))

        def make() -> tf.data.Dataset:
            if is_shuffled:  # each pass over the same dataset would have another order
                return self._prepare(hook, self.call_hook()[name])
            return dataset

        total = keras.metrics.Sum("loss", dtype="float64")
        examples = keras.metrics.Sum("examples", dtype="float64")
        create_metrics = self._components.hooks.create_metrics
        metrics = create_metrics()
        problem = find_wrong_name(metrics)
        if problem is not None:
            raise create_metrics.reject(problem)
        batches = None
        if self._components.shape.logical_replicas is not None:
            batches = keras.metrics.Sum("batches", dtype="int64")
        return EvaluationSet(make, dataset.element_spec, metrics, total, examples, batches=batches)

    def _prepare(self, hook: Hook, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns one pass over a dataset in global batches.

        Raises:
            SetupError: the dataset is endless.
        """
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise hook.reject(
                "returned an endless dataset, so an evaluation would never end; leave out repeat()."
            )
        if self._components.shape.by_rows and not has_varying_widths(dataset.element_spec):
            dataset = dataset.rebatch(self._batch_size, drop_remainder=False)
        if self._config.limit_eval is not None:
            dataset = dataset.take(self._config.limit_eval)
        return read_ahead(dataset, for_long=False)


class EvaluationProgress(NamedTuple):
    """How far the steps of a graph call have come.

    Attributes:
        has_more: whether there may be more batches, a bool scalar
        digest: a checksum of the batches, an int64 scalar, which is the same on all processes if
            these read the same data; 0 if there is a single process
        weight: the sum of the absolute sample weights that are numbers, a float64 scalar
    """

    has_more: tf.Tensor
    digest: tf.Tensor
    weight: tf.Tensor


def define_run_steps(components: Components, evaluation_set: EvaluationSet) -> GraphFunction:
    """Defines the graph function that adds batches to the metrics and sums of a set.

    Its arguments are an iterator, and the most batches to add, an int64 scalar. It returns an
    ``EvaluationProgress``.
    """
    step = EvaluationStep(components, evaluation_set)
    iterator_spec = tf.data.IteratorSpec(evaluation_set.spec)
    signature = [iterator_spec, tf.TensorSpec([], tf.int64)]

    @tf.function(autograph=False, input_signature=signature)
    def run_steps(iterator: tf.data.Iterator, steps: tf.Tensor) -> EvaluationProgress:
        def take_next(
            done: tf.Tensor, progress: EvaluationProgress
        ) -> tuple[tf.Tensor, EvaluationProgress]:
            return done + 1, step.take(iterator, progress)

        digest = tf.constant(0, tf.int64)
        if step.has_peers:  # which rows the checksum covers depends on its start
            digest = tf.identity(components.step_variable)
        start = EvaluationProgress(tf.constant(True), digest, tf.constant(0.0, tf.float64))
        _, progress = tf.while_loop(
            lambda done, progress: (done < steps) & progress.has_more,
            take_next,
            (tf.constant(0, tf.int64), start),
        )
        return progress  # type: ignore[no-any-return]

    return run_steps


class EvaluationStep:
    """Adds one batch to the metrics and sums of a set, in a graph.

    Attributes:
        has_peers: whether there are other processes, which should read the same batches
    """

    def __init__(self, components: Components, evaluation_set: EvaluationSet) -> None:
        self._components = components
        self._set = evaluation_set
        self._local_replicas = count_local_replicas(components.strategy)
        self.has_peers = components.shape.replicas > self._local_replicas
        self._seed_generator = get_seed_generator()

    def take(self, iterator: tf.data.Iterator, progress: EvaluationProgress) -> EvaluationProgress:
        """Draws a batch and adds it, if there is one.

        Args:
            iterator: reads the batches
            progress: how far the steps before have come
        """
        drawn = iterator.get_next_as_optional()
        has_batch = drawn.has_value()

        def stop() -> EvaluationProgress:
            # Processes of which only some have a batch end with different checksums.
            digest = progress.digest + tf.cast(has_batch, tf.int64)
            return progress._replace(has_more=tf.constant(False), digest=digest)

        return tf.cond(  # type: ignore[no-any-return]
            self._have_all(has_batch),
            lambda: self._add_global_batch(drawn.get_value(), progress),
            stop,
        )

    def _have_all(self, has_batch: tf.Tensor) -> tf.Tensor:
        """Returns whether every process has a batch, if they exchange values in a step.

        Otherwise, a process with a batch would wait forever for one without.
        """
        if not (self._set.exchanges and self.has_peers):
            return has_batch
        strategy = self._components.strategy
        count = strategy.run(all_reduce, (tf.cast(has_batch, tf.int64),))
        return strategy.experimental_local_results(count)[0] == self._components.shape.replicas

    def _add_global_batch(self, batch: Batch, progress: EvaluationProgress) -> EvaluationProgress:
        if self._components.shape.logical_replicas is not None:
            self._add_logical_replicas(batch)
            return self._add_weight(batch, progress)
        strategy = self._components.strategy
        first = find_first_replica(strategy)
        shares = [self._take_share(batch, first + i) for i in range(self._local_replicas)]
        strategy.run(self._add_share, args=tuple(distribute_shares(strategy, shares)))
        if self.has_peers:
            with tf.device("CPU:0"):
                progress = progress._replace(digest=add_to_digest(progress.digest, batch))
        return self._add_weight(batch, progress)

    def _add_weight(self, batch: Batch, progress: EvaluationProgress) -> EvaluationProgress:
        """Adds the sample weights of a batch, if its loss was multiplied by them."""
        weight = find_sample_weight(batch)
        if not self._set.is_weighted or weight is None:
            return progress
        size = tf.abs(tf.cast(weight, tf.float64))
        size = tf.reduce_sum(tf.where(tf.math.is_nan(size), tf.zeros_like(size), size))
        return progress._replace(weight=progress.weight + size)

    def _add_logical_replicas(self, batch: Batch) -> None:
        """Adds the shares of all logical replicas, along the same tree on any devices."""
        components = self._components
        strategy = components.strategy
        leaf_sum = LeafSum(components.shape.shares, components.shape.replicas)
        sums = [unwrap(variable) for metric in self._set.sums for variable in metric.variables]

        def run_device(batch: Batch) -> tuple[DeviceResult, list[tf.Tensor]]:
            context = tf.distribute.get_replica_context()
            device = int(tf.get_static_value(context.replica_id_in_sync_group))
            before = [variable.read_value() for variable in sums]
            return leaf_sum.compute(device, self._define_leaf(batch, sums)), before

        def finish(before: list[tf.Tensor], totals: list[tf.Tensor]) -> None:
            for variable, value, total in zip(sums, before, totals, strict=True):
                variable.assign(value + total)
            assert self._set.batches is not None
            self._set.batches.update_state(1)

        result, before = strategy.run(run_device, args=(batch,))

        def run(function: Callable[..., Any], *values: PerReplica) -> PerReplica:
            return strategy.run(function, args=values)

        totals = leaf_sum.finish(strategy, run, result.roots)
        strategy.run(finish, args=(before, totals))

    def _define_leaf(
        self, batch: Batch, sums: list[tf.Variable]
    ) -> Callable[[tf.Tensor], LeafResult]:
        """Returns the function that computes a logical replica's share of a batch on a device.

        Args:
            batch: the global batch
            sums: the variables of metrics, which are 0 before each logical replica
        """
        components = self._components
        leaves = components.shape.shares
        written = self._set.written
        values_before = [variable.read_value() for variable in written]
        assert self._set.batches is not None
        number = self._set.batches.result()
        step = components.step_variable.read_value()
        states = GeneratorStates(components, EVALUATION, step, number)

        def compute(index: tf.Tensor) -> LeafResult:
            with enter_logical_replica(index, leaves):
                states.assign(index)
                for variable in sums:
                    variable.assign(tf.zeros_like(variable))
                for variable, value in zip(written, values_before, strict=True):
                    variable.assign(value)
                share = self._take_share(batch, index)
                self._add_share(*share)
                results = [variable.read_value() for variable in sums]
                for variable, value in zip(written, values_before, strict=True):
                    variable.assign(value)
            return LeafResult(results, [], [])

        return compute

    def _take_share(self, batch: Batch, replica: Count) -> Share:
        """Returns the share of a replica; a batch that is a share already goes to the first one."""
        shape = self._components.shape
        replicas = shape.logical_replicas or shape.replicas
        if shape.by_rows or replicas == 1:
            return take_share(batch, count_rows(batch), replica, replicas, replicas)
        is_first = tf.equal(replica, 0)
        return Share(batch, rows=tf.cast(is_first, tf.int32), present=is_first)

    def _add_share(
        self,
        batch: Batch,
        rows: tf.Tensor | None,
        present: tf.Tensor | None,
        together: tf.Tensor | None,
    ) -> None:
        """Adds the share of one replica, on that replica; see ``batches.Share``."""
        if present is not None:  # a tensor out of a tf.cond has no device to reduce to
            batch = tf.nest.map_structure(tf.identity, batch, expand_composites=True)

        def find_offset() -> tf.Tensor:
            return find_offset_in_share(self._components.count_examples(batch), together)

        with (
            run_replica(self._seed_generator),
            weigh_by_rows(rows, present, together),
            place_rows(find_offset),
            run_layers(training=False),
        ):
            add_batch(TraceContext(self._components), self._set, batch, present)


def add_batch(
    context: ForwardContext,
    evaluation_set: EvaluationSet,
    batch: Batch,
    present: tf.Tensor | None,
) -> None:
    """Adds the batch of one replica to the metrics and sums of a set.

    Args:
        context: of the evaluation
        evaluation_set: the set that the batch is from
        batch: the batch; a placeholder counts nowhere
        present: whether the batch is no placeholder, a bool scalar; None if that is certain
    """
    hooks = context.hooks
    components = context.components
    output = run_model(context, batch, training=False)
    loss = compute_loss(context, batch, output, training=False)
    with note_weighted() as weights:
        loss_per_batch, extra_loss = hooks.eval_pre.trace(
            loss=loss, output=output, batch=batch, **context.hook_values()
        )
    sample_weight = find_sample_weight(batch)
    evaluation_set.is_weighted = any(weight is sample_weight for weight in weights)
    examples = weigh_batch(context, batch, output, None)
    if examples is None:
        examples = components.count_examples(batch)
    examples = tf.cast(examples, tf.float64)
    total = tf.cast(sum_loss(components, loss_per_batch, batch), tf.float64)
    total += tf.cast(extra_loss, tf.float64) * examples
    update_if(present, evaluation_set.total.update_state, total)
    update_if(present, evaluation_set.examples.update_state, examples)
    if evaluation_set.metrics:
        arguments = hooks.metric_pre.trace(
            output=output, batch=batch, train_model=components.train_model
        )
        update_metrics(evaluation_set.metrics, hooks.metric_pre, arguments, present)
