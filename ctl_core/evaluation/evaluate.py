"""Evaluation: each example exactly once, by the shares that training takes of its batches.

Of the last batch some replicas may have no rows: they compute on a stand-in, which counts nowhere.
What an evaluation writes is put back: training does not notice it. What its values decide, the best
checkpoint and an early end, is part of the run's progress: a resumed run decides as a whole one.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.cluster.collectives import (
    all_reduce,
    count_local_replicas,
    find_offset_in_share,
    place_rows,
)
from ctl_core.cluster.replica_contexts import weigh_by_rows
from ctl_core.cluster.sync import LoopStatus
from ctl_core.compat import add_called_ops, get_seed_generator, list_stages, run_layers, run_replica
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
from ctl_core.model.components import Components, ForwardContext, TraceContext
from ctl_core.model.copies import ReplicaCopies
from ctl_core.model.forward import compute_loss, run_model, sum_loss, weigh_batch
from ctl_core.model.metrics import read_results, update_if, update_metrics
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.numerics.variables import unwrap
from ctl_core.run.errors import SetupError, suggest
from ctl_core.run.settings import Config
from ctl_core.schedule import StepsPerCall


@dataclasses.dataclass
class EvaluationSet:
    """One set of evaluation data, its metrics and the graph function that updates them.

    Attributes:
        make: returns the dataset, always the same one
        spec: of its elements
        metrics: the user's metrics by name
        total, examples: sums in float64, of the loss and of what it is the mean over
        run_steps: the graph function (iterator, steps) -> (may be more, digest), once traced
        exchanges: whether hooks or layers exchange something in it
        copies: of what the evaluation writes, once traced
        names: the names of the metrics' scalars, once traced
    """

    make: Callable[[], tf.data.Dataset]
    spec: Any
    metrics: dict[str, keras.Metric]
    total: keras.Metric
    examples: keras.Metric
    run_steps: Any = None
    exchanges: bool = False
    copies: Any = None
    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def sums(self) -> list[keras.Metric]:
        """All that each evaluation begins anew."""
        return [*self.metrics.values(), self.total, self.examples]


class Evaluation:
    """All sets of evaluation data, each with a graph and metrics of its own.

    Attributes:
        sets: by name; a single one without a name under ""
        arrays: the results of the last evaluation that are no numbers, such as a confusion matrix
    """

    def __init__(
        self, components: Components, recording: Recording, sets: dict[str, EvaluationSet]
    ) -> None:
        self.sets = sets
        self._components, self._recording = components, recording
        self._frozen: list[bool] | None = None
        self.arrays: dict[str, np.ndarray] = {}

    @property
    def names(self) -> list[str]:
        """The names of the values: ``loss``, or ``NAME/loss`` where the sets have names."""
        return [
            f"{name}/{value}" if name else value
            for name, one in self.sets.items()
            for value in ("loss", *one.names)
        ]

    def list_passing_variables(self) -> list[tf.Variable]:
        """Returns the variables that each evaluation begins anew: no checkpoint need hold them."""
        metrics = [metric for one in self.sets.values() for metric in one.sums]
        return [unwrap(variable) for metric in metrics for variable in metric.variables]

    def trace(self) -> None:
        """Traces the graphs without running them, unless that is done for what is frozen now.

        What is frozen is not regularized.
        """
        if self._frozen == (frozen := read_flags(self._recording)):
            return
        self._frozen = frozen
        for one in self.sets.values():
            for one.exchanges in (False, True):  # traced again if it turns out that they do
                one.run_steps = define_run_steps(self._components, one)
                graph = one.run_steps.get_concrete_function().graph
                ops = add_called_ops(graph.get_operations())
                if not any(op.type.startswith("Collective") for op in ops):
                    break
            # Metrics keep their values, so that hooks can read them after the evaluation.
            passing = set(map(id, self.list_passing_variables()))
            written = self._recording.find_written(graph, self._components.strategy)
            kept = [variable for variable in written if id(variable) not in passing]
            one.copies = ReplicaCopies(self._components.strategy, kept)

    def evaluate(
        self, sync: Callable[[LoopStatus], LoopStatus] = lambda status: status
    ) -> dict[str, float] | None:
        """Goes once over the evaluation data, set by set.

        Args:
            sync: asked about once a second, in a cluster for all processes: a signal in its answer
                ends the evaluation early

        Returns:
            The mean loss per example, or by what batches weigh, and the metrics, see ``names``;
            None if ended early.
        """
        self.trace()
        values: dict[str, float] = {}
        self.arrays = {}
        for set_name, one in self.sets.items():
            prefix = f"{set_name}/" if set_name else ""
            with one.copies.put_back_after():
                if not _add_batches(one, sync):
                    return None
                total, examples = float(one.total.result()), float(one.examples.result())
                results = read_results(one.metrics)
                values[f"{prefix}loss"] = total / examples if examples else math.nan
                values |= {f"{prefix}{name}": value for name, value in results.scalars.items()}
                self.arrays |= {f"{prefix}{name}": array for name, array in results.arrays.items()}
        return values


def _add_batches(one: EvaluationSet, sync: Callable[[LoopStatus], LoopStatus]) -> bool:
    """Adds all batches to the metrics and sums of a set; returns whether to the end."""
    for metric in one.sums:
        metric.reset_state()
    iterator = iter(one.make())
    # Between processes, a collective takes no other shape in one call than in its first step.
    steps_per_call = StepsPerCall(most=1 if one.exchanges else 100_000)
    while True:
        with steps_per_call.measure(steps_per_call.limit) as steps:
            more, digest = map(int, one.run_steps(iterator, tf.constant(steps, tf.int64)))
        status = sync(LoopStatus(steps_per_call=steps_per_call.limit, data=digest))
        steps_per_call.limit = status.steps_per_call
        if status.signal or not more:
            return not more


def create_evaluation(
    components: Components, config: Config, recording: Recording
) -> Evaluation | None:
    """Creates what ``create_eval_dataset`` and ``create_metrics`` ask for; None without data."""
    hooks, hook = components.hooks, components.hooks.create_eval_dataset
    if hook is None:
        if hooks.after_eval:
            raise hooks.after_eval[0].reject(
                "there is no evaluation that it could run after; write create_eval_dataset."
            )
        return None
    size = config.eval_batch_size or components.shape.batch
    if not components.shape.by_rows:  # each is a replica's share
        size = max(1, size // components.shape.replicas)

    def call() -> dict[str, Any]:
        with keep_seeds():
            keras.utils.set_random_seed(config.seed)
            made = hook(global_batch_size=size, per_replica_batch_size=size)
        return made if isinstance(made, dict) else {"": made}

    def create(name: str, made: Any) -> EvaluationSet:
        own = dataclasses.replace(hook, name=f"{hook.name}['{name}']") if name else hook
        reader = open_reader(own, made, lambda: call()[name])
        dataset = prepare(components, config, own, reader.read(goes_on=False) if reader else made)
        refuse_unfinished_caches(own, dataset)
        # A shuffle has another order in each pass, unless it is made anew.
        shuffles = any("Shuffle" in type(stage).__name__ for stage in list_stages(dataset))

        def make() -> tf.data.Dataset:
            return prepare(components, config, own, call()[name]) if shuffles else dataset

        sums = [keras.metrics.Sum(kind, dtype="float64") for kind in ("loss", "examples")]
        return EvaluationSet(make, dataset.element_spec, hooks.create_metrics(), *sums)

    sets = {name: create(name, made) for name, made in call().items()}
    return Evaluation(components, recording, sets)


def prepare(
    components: Components, config: Config, hook: Hook, dataset: tf.data.Dataset
) -> tf.data.Dataset:
    """Returns one pass of global batches of what the hook made; refuses what has no end."""
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise hook.reject(
            "returned an endless dataset, so an evaluation would never end; leave out repeat()."
        )
    if components.shape.by_rows and not has_varying_widths(dataset.element_spec):
        batch = config.eval_batch_size or components.shape.batch
        dataset = dataset.rebatch(batch, drop_remainder=False)
    if config.limit_eval is not None:
        dataset = dataset.take(config.limit_eval)
    return read_ahead(dataset, for_long=False)


def define_run_steps(components: Components, one: EvaluationSet) -> Any:
    """Defines the graph function that evaluates so many elements, or those that are left."""
    strategy, replicas = components.strategy, components.shape.replicas
    by_rows = components.shape.by_rows
    generator = get_seed_generator()

    def on_replica(batch: Any, rows: Any, present: Any, together: Any) -> None:
        if present is not None:  # what a condition returns names no device to reduce to
            batch = tf.nest.map_structure(tf.identity, batch, expand_composites=True)

        def find_offset() -> tf.Tensor:
            return find_offset_in_share(components.count_examples(batch), together)

        with (
            run_replica(generator),
            weigh_by_rows(rows, present, together),
            place_rows(find_offset),
            run_layers(training=False),
        ):
            add_batch(TraceContext(components), one, batch, present)

    def share_of(batch: Any, replica: int) -> Share:
        if by_rows or replicas == 1:
            return take_share(batch, count_rows(batch), replica, replicas, replicas)
        return Share(batch, tf.constant(int(replica == 0)), tf.constant(replica == 0))

    def take_step(batch: Any, digest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        first = find_first_replica(strategy)
        shares = [share_of(batch, first + i) for i in range(count_local_replicas(strategy))]
        strategy.run(on_replica, args=tuple(distribute_shares(strategy, shares)))
        if replicas > len(shares):  # other processes read the same, or should
            with tf.device("CPU:0"):
                digest = add_to_digest(digest, batch)
        return tf.constant(True), digest

    spec = [tf.data.IteratorSpec(one.spec), tf.TensorSpec([], tf.int64)]

    def have_all(own: tf.Tensor) -> tf.Tensor:
        """Whether every process has a batch: in a step, one would wait for the others for ever."""
        if not one.exchanges or replicas == count_local_replicas(strategy):
            return own
        count = strategy.run(all_reduce, (tf.cast(own, tf.int64),))
        return strategy.experimental_local_results(count)[0] == replicas

    @tf.function(autograph=False, input_signature=spec)
    def run_steps(iterator: Any, steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def body(done: tf.Tensor, _: tf.Tensor, digest: tf.Tensor) -> Any:
            drawn = iterator.get_next_as_optional()
            more = drawn.has_value()
            after = tf.cond(
                have_all(more),
                lambda: take_step(drawn.get_value(), digest),
                lambda: (tf.constant(False), digest + tf.cast(more, tf.int64)),
            )
            return done + 1, *after

        start = tf.constant(0, tf.int64), tf.constant(True), tf.constant(0, tf.int64)
        return tf.while_loop(lambda done, more, _: (done < steps) & more, body, start)[1:]

    return run_steps


def add_batch(
    context: ForwardContext, one: EvaluationSet, batch: Any, present: tf.Tensor | None
) -> None:
    """Adds one replica's batch to the metrics and sums of a set; a stand-in counts nowhere."""
    hooks, components = context.hooks, context.components
    output = run_model(context, batch, training=False)
    loss = compute_loss(context, batch, output, training=False)
    values = {"output": output, "batch": batch, **context.hook_values()}
    loss_per_batch, extra_loss = hooks.eval_pre.trace(loss=loss, **values)
    weight = weigh_batch(context, batch, output, None)
    examples = components.count_examples(batch) if weight is None else weight
    examples = tf.cast(examples, tf.float64)
    extra = tf.cast(extra_loss, tf.float64) * examples
    total = tf.cast(sum_loss(components, loss_per_batch, batch), tf.float64) + extra
    update_if(present, one.total.update_state, total)
    update_if(present, one.examples.update_state, examples)
    if one.metrics:
        named = {"output": output, "batch": batch, "train_model": components.train_model}
        arguments = hooks.metric_pre.trace(**named)
        update_metrics(one.metrics, hooks.metric_pre, arguments, present)


# Words in the names of metrics of which it is plain which way is better.
_LOWER = {"loss", "error", "mse", "mae", "rmse", "mape", "perplexity", "divergence", "distance"}
_HIGHER = {"acc", "accuracy", "auc", "precision", "recall", "f1", "iou", "dice", "r2", "score"}


@dataclasses.dataclass(frozen=True)
class Criterion:
    """What is better.

    Attributes:
        key: what the progress of a run has it under; another criterion begins anew
        metric: a name of an evaluation's values
        highest: whether more is better
        patience: after how many evaluations without a better value training ends; 0: never
    """

    key: str
    metric: str
    highest: bool
    patience: int

    def judge(
        self, step: int, values: Mapping[str, float], best: dict[str, list[float]]
    ) -> str | None:
        """Compares a value with the best so far, than which NaN is no better; returns why to end.

        ``best``, which is changed, has by criterion the best value, its step, and how many
        evaluations there were since.
        """
        sign = 1 if self.highest else -1
        value = values[self.metric]
        before, at, since = best.get(self.key, [-sign * math.inf, -1, 0])
        if sign * value > sign * before:
            before, at, since = value, step, -1
        best[self.key] = [before, at, since + 1]
        if not self.patience or since + 1 < self.patience:
            return None
        return (
            f"early_stop: {self.metric} was not better than {before:.4g} (step {at:g}) in "
            f"{self.patience} evaluations."
        )


def read_criteria(config: Config, names: Sequence[str]) -> list[Criterion]:
    """Reads ``keep_best`` and ``early_stop``; ``names`` are those of an evaluation's values.

    Raises:
        SetupError: one names no metric, or it is not clear which way is better.
    """
    criteria = []
    for setting, text in {"keep_best": config.keep_best, "early_stop": config.early_stop}.items():
        if not text:
            continue
        metric, *rest = text.split(":")
        if metric not in names:
            there = ", ".join(names) or "none, without create_eval_dataset"
            near = suggest(metric, names)
            raise SetupError(f"{setting}: no metric is called {metric!r}{near} (there: {there})")
        patience = int(rest.pop()) if setting == "early_stop" else 0
        words = set(re.split(r"[/_]", metric))
        mode = rest[0] if rest else "min" if words & _LOWER else "max" if words & _HIGHER else None
        if mode is None:
            raise SetupError(
                f"{setting}: say whether {metric} is better when it is higher or lower: "
                f"{metric}:max or {metric}:min."
            )
        criteria.append(Criterion(f"{setting}={metric}:{mode}", metric, mode == "max", patience))
    return criteria
