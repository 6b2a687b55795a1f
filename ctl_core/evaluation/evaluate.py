"""Evaluation: each example exactly once, by the shares that training takes of its batches.

Of the last batch some replicas may have no rows: they compute on a stand-in, which counts nowhere.
What an evaluation writes, but for its own metrics, is put back: training does not notice it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.ahead import read_ahead
from ctl_core.batches import check_dataset, count_rows, open_reader, widths_vary
from ctl_core.checks.returned import count_examples, read_extra_loss
from ctl_core.cluster.strategy import local_replicas
from ctl_core.cluster.sync import LoopStatus
from ctl_core.collectives import counting_rows
from ctl_core.compat import (
    drawing_from,
    global_seed_generator,
    stages,
    with_called,
)
from ctl_core.forward import compute_loss, keep_if, run_model, sum_loss, weigh_batch
from ctl_core.hooks import Hook
from ctl_core.input import Share, distribute_shares, first_replica, take_share
from ctl_core.metrics import read_results, update_metrics
from ctl_core.model.parts import Moment, Parts
from ctl_core.model.recording import Recording
from ctl_core.model.variables import plain_variable
from ctl_core.numerics.staging import ReplicaCopies
from ctl_core.process_state import seeds_kept
from ctl_core.schedule import ChunkLength
from ctl_core.settings import Config
from ctl_core.training_mode import inference

SUMS = ("loss", "extra_loss", "examples")


@dataclasses.dataclass
class EvaluationSet:
    """One set of evaluation data, its metrics and the graph function that updates them.

    Attributes:
        hook: that makes the data, with the name of the set if it has one
        make: returns the dataset, always the same one
        metrics: the user's metrics by name
        sums: by the names of ``SUMS``, float64 scalars, added up over the replicas
        run_steps: the graph function, once defined
        exchanges: whether processes exchange something in it
        kept: copies of what the evaluation writes and training goes on with, once traced
    """

    hook: Hook
    make: Callable[[], tf.data.Dataset]
    metrics: dict[str, keras.Metric]
    sums: dict[str, tf.Variable]
    run_steps: Any = None
    exchanges: bool = False
    kept: ReplicaCopies | None = None


class Evaluation:
    """All sets of evaluation data, each with a graph and metrics of its own.

    Attributes:
        sets: by name; a single one without a name under ""
    """

    def __init__(self, parts: Parts, sets: dict[str, EvaluationSet]) -> None:
        self.sets = sets
        self._parts = parts

    @property
    def names(self) -> list[str]:
        """The names of the values: ``loss``, or ``NAME/loss`` where the sets have names."""
        return [
            name_value(name, value)
            for name, one in self.sets.items()
            for value in ("loss", *one.metrics)
        ]

    def passing_variables(self) -> list[tf.Variable]:
        """Returns the variables that each evaluation begins anew: no checkpoint need hold them.

        Metrics with a ``reset_state`` of their own may keep something.
        """
        metrics = [metric for one in self.sets.values() for metric in one.metrics.values()]
        reset = [m for m in metrics if type(m).reset_state.__module__.startswith("keras.")]
        sums = [total for one in self.sets.values() for total in one.sums.values()]
        return [*map(plain_variable, (v for m in reset for v in m.variables)), *sums]

    def trace(self, recording: Recording) -> None:
        """Traces the graphs without running them: their hooks are checked before training."""
        for one in self.sets.values():
            dataset = one.make()
            one.run_steps = define_run_steps(self._parts, one)
            number = tf.TensorSpec([], tf.int64)
            graph = one.run_steps.get_concrete_function(iter(dataset), number).graph
            own = [v for metric in one.metrics.values() for v in metric.variables]
            mine = {id(plain_variable(v)) for v in [*own, *one.sums.values()]}
            written = recording.find_written(graph, self._parts.strategy)
            touched = [v for v in written if id(v) not in mine]
            ops = with_called(graph.get_operations())
            one.exchanges = any(op.type.startswith("Collective") for op in ops)
            one.kept = ReplicaCopies(self._parts.strategy, touched)

    def evaluate(
        self, sync: Callable[[LoopStatus], LoopStatus] = lambda status: status
    ) -> dict[str, float] | None:
        """Goes once over the evaluation data, set by set.

        Args:
            sync: asked about once a second, in a cluster for all processes: a signal in its answer
                ends the evaluation early

        Returns:
            The mean loss per example (plus the extra loss) and the metrics by name, see ``names``;
            None if ended early. With ``batch_weight`` the loss is the mean by what batches weigh,
            and NaN if that is nothing.
        """
        found: dict[str, float] = {}
        for name, one in self.sets.items():
            with one.kept.put_back_after() if one.kept else contextlib.nullcontext():
                values = self._evaluate_set(one, sync)
            if values is None:
                return None
            found |= {name_value(name, value): number for value, number in values.items()}
        return found

    def _evaluate_set(
        self, one: EvaluationSet, sync: Callable[[LoopStatus], LoopStatus]
    ) -> dict[str, float] | None:
        for metric in one.metrics.values():
            metric.reset_state()
        for total in one.sums.values():
            total.assign(0.0)
        iterator = iter(one.make())
        if one.run_steps is None:
            one.run_steps = define_run_steps(self._parts, one)
        # Between processes, a collective takes no other shape in one call than in its first step.
        chunk = ChunkLength(most=1 if one.exchanges else 100_000)
        while True:
            with chunk.timed(chunk.limit) as steps:
                more = bool(one.run_steps(iterator, tf.constant(steps, tf.int64)))
            status = sync(LoopStatus(steps_per_call=chunk.limit, more=more))
            chunk.limit = status.steps_per_call
            if not status.more:
                break
            if status.signal:
                return None
        sums = {name: float(total.read_value()) for name, total in one.sums.items()}
        total = sums["loss"] + sums["extra_loss"]
        loss = total / sums["examples"] if sums["examples"] else math.nan
        return {"loss": loss, **read_results(one.metrics, self._parts.hooks.create_metrics)}


def name_value(name: str, value: str) -> str:
    """Returns what a value of the evaluation set ``name`` is called."""
    return f"{name}/{value}" if name else value


def create_evaluation(parts: Parts, config: Config) -> Evaluation | None:
    """Creates what ``create_eval_dataset`` and ``create_metrics`` ask for; None without data.

    Raises:
        SetupError: the hooks return something else than they should.
    """
    hooks = parts.hooks
    hook = hooks.create_eval_dataset
    if hook is None:
        if hooks.after_eval:
            raise hooks.after_eval[0].reject(
                "there is no evaluation that it could run after; write create_eval_dataset."
            )
        return None
    shape = parts.shape
    batch = config.eval_batch_size or shape.batch
    per_replica = max(
        1, batch // shape.replicas // (1 if config.eval_batch_size else shape.accumulate_steps)
    )

    def call() -> Any:
        with seeds_kept():
            keras.utils.set_random_seed(config.seed)
            return hook(per_replica_batch_size=per_replica)

    first = call()
    names = list(first) if isinstance(first, dict) else [""]
    if not names:
        raise hook.reject("returned an empty dict, expected datasets by name.")
    sets = {}
    for name in names:
        if name and (not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]{0,99}", name)):
            raise hook.reject(
                f"returned a dataset by the name {name!r}, expected a text of letters, digits, "
                "'_', '-' and '.', such as 'test'."
            )
        named = dataclasses.replace(hook, name=f"{hook.name}['{name}']") if name else hook

        def remake(name: str = name) -> Any:
            made = call()
            return made[name] if name else made

        def make(named: Hook = named, remake: Callable[[], Any] = remake) -> tf.data.Dataset:
            return prepare(parts, named, remake(), batch, config.limit_eval)

        made = first[name] if name else first
        reader = open_reader(named, made, remake)
        if reader is not None:  # begins anew by itself
            made = reader.read_elements()
        dataset = prepare(parts, named, made, batch, config.limit_eval)
        # A shuffle has another order in each pass, unless it is made anew.
        shuffles = any("Shuffle" in type(stage).__name__ for stage in stages(dataset))
        own = hooks.create_metrics()
        sums = {key: _create_sum(key) for key in SUMS}
        sets[name] = EvaluationSet(
            named, make if shuffles else functools.partial(_return, dataset), own, sums
        )
    return Evaluation(parts, sets)


def _return(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset


def prepare(parts: Parts, hook: Hook, made: Any, batch: int, limit: int | None) -> tf.data.Dataset:
    """Returns one pass of global batches of what the hook made.

    Raises:
        SetupError: it is no dataset, endless, or has single examples.
    """
    dataset = check_dataset(hook, made)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise hook.reject(
            "returned an endless dataset, so an evaluation would never end; leave out repeat()."
        )
    by_rows = parts.hooks.count_examples.is_default
    if by_rows and all(part.shape.rank == 0 for part in tf.nest.flatten(dataset.element_spec)):
        raise hook.reject(
            "returned single examples, expected batches: use dataset.batch(per_replica_batch_size)."
        )
    if by_rows and not widths_vary(dataset.element_spec):
        dataset = dataset.rebatch(batch, drop_remainder=False)
    if limit is not None:
        dataset = dataset.take(limit)
    return read_ahead(dataset, for_long=False)


def _create_sum(name: str) -> tf.Variable:
    return tf.Variable(
        0.0,
        dtype=tf.float64,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def define_run_steps(parts: Parts, one: EvaluationSet) -> Any:
    """Defines the graph function (iterator, steps) -> whether there may be more."""
    strategy, replicas = parts.strategy, parts.shape.replicas
    by_rows = parts.hooks.count_examples.is_default
    generator = global_seed_generator()

    def on_replica(batch: Any, rows: Any, present: Any, together: Any) -> None:
        if present is not None:  # what a condition returns names no device to reduce to
            batch = tf.nest.map_structure(tf.identity, batch, expand_composites=True)
        with drawing_from(generator), counting_rows(rows, present, together), inference():
            add_batch(parts, one, batch, present)

    def share_of(batch: Any, replica: int) -> Share:
        if by_rows or replicas == 1:
            return take_share(batch, count_rows(batch), replica, replicas, replicas)
        return Share(batch, tf.constant(int(replica == 0)), tf.constant(replica == 0))

    def take_step(optional: Any) -> tf.Tensor:
        batch = optional.get_value()
        first = first_replica(strategy)
        shares = [share_of(batch, first + i) for i in range(local_replicas(strategy))]
        strategy.run(on_replica, args=distribute_shares(strategy, shares))
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
    """Adds one replica's batch to the metrics and sums of a set.

    Hooks are called in the replica's own graph, where they can exchange values with the other
    replicas; a stand-in (``present`` is False) must only not count.
    """
    hooks, moment = parts.hooks, Moment()
    output = run_model(parts, moment, batch, training=False)
    loss = compute_loss(parts, moment, batch, output, training=False)
    values = {"output": output, "batch": batch, **parts.values(moment)}
    loss_per_batch, extra_loss = hooks.eval_pre.in_graph(loss=loss, **values)
    extra = read_extra_loss(extra_loss, tf.float64, hooks.eval_pre)
    weight = weigh_batch(parts, moment, batch, output, None)
    examples = tf.cast(
        count_examples(hooks.count_examples, batch) if weight is None else weight, tf.float64
    )

    def add(name: str, value: tf.Tensor) -> None:
        one.sums[name].assign_add(keep_if(present, value))

    add("loss", tf.cast(sum_loss(parts, loss_per_batch, batch), tf.float64))
    add("extra_loss", extra * examples)
    add("examples", examples)
    if one.metrics:
        named = {"output": output, "batch": batch, "train_model": parts.train_model}
        arguments = hooks.metric_pre.in_graph(**named)
        update_metrics(one.metrics, hooks.metric_pre, arguments, present)
