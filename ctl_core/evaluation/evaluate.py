"""Evaluation: each example exactly once, by the shares that training takes of its batches.

Of the last batch some replicas may have no rows: they compute on a stand-in, which counts nowhere.
What an evaluation writes, but for its own metrics, is put back: training does not notice it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.cluster.collectives import counting_rows, local_replicas
from ctl_core.cluster.sync import LoopStatus
from ctl_core.compat import (
    drawing_from,
    global_seed_generator,
    layers_run,
    stages,
    with_called,
)
from ctl_core.hooks.hooks import Hook
from ctl_core.hooks.recording import Recording
from ctl_core.input.batches import (
    Share,
    count_rows,
    distribute_shares,
    first_replica,
    take_share,
    widths_vary,
)
from ctl_core.input.prefetch import read_ahead
from ctl_core.input.readers import open_reader
from ctl_core.model.forward import compute_loss, run_model, sum_loss, weigh_batch
from ctl_core.model.metrics import read_results, update_if, update_metrics
from ctl_core.model.parts import Parts
from ctl_core.model.schedule import ChunkLength
from ctl_core.numerics.randomness import seeds_kept
from ctl_core.numerics.replicas import ReplicaCopies
from ctl_core.numerics.variables import plain_variable
from ctl_core.run.settings import Config

Sync = Callable[[LoopStatus], LoopStatus]


@dataclasses.dataclass
class EvaluationSet:
    """One set of evaluation data, its metrics and the graph function that updates them.

    Attributes:
        hook: that makes the data, with the name of the set if it has one
        make: returns the dataset, always the same one
        metrics: the user's metrics by name
        total, examples: sums in float64, of the loss and of what it is the mean over
        run_steps: the graph function, once traced
        exchanges: whether processes exchange something in it
        copies: of what the evaluation writes and training goes on with, once traced
    """

    hook: Hook
    make: Callable[[], tf.data.Dataset]
    metrics: dict[str, keras.Metric]
    total: keras.Metric
    examples: keras.Metric
    run_steps: Any = None
    exchanges: bool = False
    copies: ReplicaCopies | None = None

    @property
    def passing(self) -> list[keras.Metric]:
        """All that each evaluation begins anew."""
        return [*self.metrics.values(), self.total, self.examples]


class Evaluation:
    """All sets of evaluation data, each with a graph and metrics of its own.

    Attributes:
        sets: by name; a single one without a name under ""
    """

    def __init__(self, parts: Parts, recording: Recording, sets: dict[str, EvaluationSet]) -> None:
        self.sets = sets
        self._parts, self._recording = parts, recording

    @property
    def names(self) -> list[str]:
        """The names of the values: ``loss``, or ``NAME/loss`` where the sets have names."""
        return [
            name_value(name, value)
            for name, one in self.sets.items()
            for value in ("loss", *one.metrics)
        ]

    def passing_variables(self) -> list[tf.Variable]:
        """Returns the variables that each evaluation begins anew: no checkpoint need hold them."""
        metrics = [metric for one in self.sets.values() for metric in one.passing]
        # Metrics with a reset_state of their own may keep something.
        reset = [m for m in metrics if type(m).reset_state.__module__.startswith("keras.")]
        return [plain_variable(variable) for metric in reset for variable in metric.variables]

    def trace(self) -> None:
        """Traces the graphs without running them: their hooks are checked before training."""
        for one in self.sets.values():
            one.run_steps = define_run_steps(self._parts, one)
            iterator, number = iter(one.make()), tf.TensorSpec([], tf.int64)
            graph = one.run_steps.get_concrete_function(iterator, number).graph
            mine = {id(plain_variable(v)) for metric in one.passing for v in metric.variables}
            written = self._recording.find_written(graph, self._parts.strategy)
            touched = [v for v in written if id(v) not in mine]
            one.copies = ReplicaCopies(self._parts.strategy, touched)
            ops = with_called(graph.get_operations())
            one.exchanges = any(op.type.startswith("Collective") for op in ops)

    def evaluate(self, sync: Sync = lambda status: status) -> dict[str, float] | None:
        """Goes once over the evaluation data, set by set.

        Args:
            sync: asked about once a second, in a cluster for all processes: a signal in its answer
                ends the evaluation early

        Returns:
            The mean loss per example, or by what batches weigh, and the metrics, see ``names``;
            None if ended early.
        """
        found: dict[str, float] = {}
        for name, one in self.sets.items():
            if one.copies is None:
                self.trace()
            assert one.copies is not None
            with one.copies.put_back_after():
                if not self._add_batches(one, sync):
                    return None
                total, examples = float(one.total.result()), float(one.examples.result())
                loss = total / examples if examples else math.nan
                values = read_results(one.metrics)
            for value, number in {"loss": loss, **values}.items():
                found[name_value(name, value)] = number
        return found

    def _add_batches(self, one: EvaluationSet, sync: Sync) -> bool:
        """Adds all batches to the metrics and sums of a set; returns whether to the end."""
        for metric in one.passing:
            metric.reset_state()
        iterator = iter(one.make())
        # Between processes, a collective takes no other shape in one call than in its first step.
        chunk = ChunkLength(most=1 if one.exchanges else 100_000)
        while True:
            with chunk.timed(chunk.limit) as steps:
                more = bool(one.run_steps(iterator, tf.constant(steps, tf.int64)))
            status = sync(LoopStatus(steps_per_call=chunk.limit, more=more))
            chunk.limit = status.steps_per_call
            if status.signal or not status.more:
                return not status.more


def name_value(name: str, value: str) -> str:
    """Returns what a value of the evaluation set ``name`` is called."""
    return f"{name}/{value}" if name else value


def create_evaluation(parts: Parts, config: Config, recording: Recording) -> Evaluation | None:
    """Creates what ``create_eval_dataset`` and ``create_metrics`` ask for; None without data.

    Raises:
        SetupError: the hooks return something else than they should.
    """
    hooks, hook = parts.hooks, parts.hooks.create_eval_dataset
    if hook is None:
        if hooks.after_eval:
            raise hooks.after_eval[0].reject(
                "there is no evaluation that it could run after; write create_eval_dataset."
            )
        return None
    per_replica = parts.shape.per_replica
    if config.eval_batch_size is not None:
        per_replica = max(1, config.eval_batch_size // parts.shape.replicas)

    def call(name: str = "") -> Any:
        with seeds_kept():
            keras.utils.set_random_seed(config.seed)
            made = hook(per_replica_batch_size=per_replica)
        return made[name] if name else made

    made = call()
    sets = {}
    for name, one in (made if isinstance(made, dict) else {"": made}).items():
        named = dataclasses.replace(hook, name=f"{hook.name}['{name}']") if name else hook
        sets[name] = _create_set(parts, config, named, one, functools.partial(call, name))
    return Evaluation(parts, recording, sets)


def _create_set(
    parts: Parts, config: Config, hook: Hook, made: Any, remake: Callable[[], Any]
) -> EvaluationSet:
    """Returns the set of one dataset or reader; ``remake`` makes it once more."""
    reader = open_reader(hook, made, remake)
    dataset = prepare(parts, config, hook, made if reader is None else reader.read(goes_on=False))
    # A shuffle has another order in each pass, unless it is made anew.
    shuffles = any("Shuffle" in type(stage).__name__ for stage in stages(dataset))

    def make() -> tf.data.Dataset:
        return prepare(parts, config, hook, remake()) if shuffles else dataset

    sums = [keras.metrics.Sum(name, dtype="float64") for name in ("loss", "examples")]
    return EvaluationSet(hook, make, parts.hooks.create_metrics(), *sums)


def prepare(parts: Parts, config: Config, hook: Hook, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns one pass of global batches of what the hook made.

    Raises:
        SetupError: it is endless.
    """
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise hook.reject(
            "returned an endless dataset, so an evaluation would never end; leave out repeat()."
        )
    if parts.hooks.count_examples.is_default and not widths_vary(dataset.element_spec):
        batch = config.eval_batch_size or parts.shape.batch
        dataset = dataset.rebatch(batch, drop_remainder=False)
    if config.limit_eval is not None:
        dataset = dataset.take(config.limit_eval)
    return read_ahead(dataset, for_long=False)


def define_run_steps(parts: Parts, one: EvaluationSet) -> Any:
    """Defines the graph function (iterator, steps) -> whether there may be more."""
    strategy, replicas = parts.strategy, parts.shape.replicas
    by_rows = parts.hooks.count_examples.is_default
    generator = global_seed_generator()

    def on_replica(batch: Any, rows: Any, present: Any, together: Any) -> None:
        if present is not None:  # what a condition returns names no device to reduce to
            batch = tf.nest.map_structure(tf.identity, batch, expand_composites=True)
        with (
            drawing_from(generator),
            counting_rows(rows, present, together),
            layers_run(training=False),
        ):
            add_batch(parts, one, batch, present)

    def share_of(batch: Any, replica: int) -> Share:
        if by_rows or replicas == 1:
            return take_share(batch, count_rows(batch), replica, replicas, replicas)
        return Share(batch, tf.constant(int(replica == 0)), tf.constant(replica == 0))

    def take_step(optional: Any) -> tf.Tensor:
        batch = optional.get_value()
        first = first_replica(strategy)
        shares = [share_of(batch, first + i) for i in range(local_replicas(strategy))]
        strategy.run(on_replica, args=tuple(distribute_shares(strategy, shares)))
        return tf.constant(True)

    @tf.function(autograph=False, reduce_retracing=True)
    def run_steps(iterator: Any, steps: tf.Tensor) -> tf.Tensor:
        def body(done: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            optional = iterator.get_next_as_optional()
            more = tf.cond(
                optional.has_value(), lambda: take_step(optional), lambda: tf.constant(False)
            )
            return done + 1, more

        _, more = tf.while_loop(
            lambda done, more: (done < steps) & more,
            body,
            (tf.constant(0, tf.int64), tf.constant(True)),
        )
        return more

    return run_steps


def add_batch(parts: Parts, one: EvaluationSet, batch: Any, present: tf.Tensor | None) -> None:
    """Adds one replica's batch to the metrics and sums of a set; a stand-in counts nowhere."""
    hooks = parts.hooks
    output = run_model(parts, batch, training=False)
    loss = compute_loss(parts, batch, output, training=False)
    values = {"output": output, "batch": batch, **parts.values()}
    loss_per_batch, extra_loss = hooks.eval_pre.in_graph(loss=loss, **values)
    weight = weigh_batch(parts, batch, output, None)
    examples = parts.count_examples(batch) if weight is None else weight
    examples = tf.cast(examples, tf.float64)
    extra = tf.cast(extra_loss, tf.float64) * examples
    total = tf.cast(sum_loss(parts, loss_per_batch, batch), tf.float64) + extra
    update_if(present, one.total.update_state, total)
    update_if(present, one.examples.update_state, examples)
    if one.metrics:
        named = {"output": output, "batch": batch, "train_model": parts.train_model}
        arguments = hooks.metric_pre.in_graph(**named)
        update_metrics(one.metrics, hooks.metric_pre, arguments, present)
