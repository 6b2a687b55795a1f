"""Evaluation and prediction: each example exactly once, whatever the replicas and remainders."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checks.examples import checked_count
from ctl_core.chunks import ChunkLength
from ctl_core.cluster.sync import LoopStatus
from ctl_core.cluster.task import Task
from ctl_core.context import StepContext
from ctl_core.errors import RunError
from ctl_core.eval_data import EvaluationData, create_eval_data
from ctl_core.eval_step import Sums, build_run_steps
from ctl_core.hooks import Hooks
from ctl_core.metrics import create_metrics, results
from ctl_core.numerics.staging import ReplicaCopies
from ctl_core.run_state.tracking import plain_variable, written_variables


@dataclasses.dataclass
class EvaluationSet:
    """One set of evaluation data, its metrics and the graph function that updates them.

    Attributes:
        data: the evaluation data
        metrics: the user's metrics by name
        sums: of the loss, the extra loss and the examples
        run_steps: graph function (iterator, steps, rows) -> whether there may be more; see
            ``eval_step.build_run_steps``
        exchanges: holds an entry, once traced, if replicas exchange something meanwhile
        processes: how many evaluate together
        hooks: the hooks
        per_replica: how many examples a batch of full size holds
        kept: copies of what the evaluation writes to and training goes on with, once traced
    """

    data: EvaluationData
    metrics: dict[str, keras.Metric]
    sums: Sums
    run_steps: Callable[[Any, tf.Tensor, tf.Tensor], tf.Tensor]
    exchanges: list[str]
    processes: int
    hooks: Hooks
    per_replica: int
    kept: ReplicaCopies | None = None

    def traced(self, iterator: Any) -> Any:
        """Returns the concrete graph function for an iterator, traced if it is the first."""
        number = tf.TensorSpec([], tf.int64)
        return self.run_steps.get_concrete_function(  # type: ignore[attr-defined]
            iterator, number, number
        )

    def lasting_metrics(self) -> dict[str, keras.Metric]:
        """Those that may keep something when they are reset: by a ``reset_state`` of their own."""
        return {
            name: metric
            for name, metric in self.metrics.items()
            if not type(metric).reset_state.__module__.startswith("keras.")
        }


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """All sets of evaluation data, each with a graph and metrics of its own.

    Attributes:
        sets: by name; a single one without a name under ""
    """

    sets: dict[str, EvaluationSet]

    @property
    def names(self) -> list[str]:
        """The names of the values: ``loss``, or ``NAME/loss`` where the sets have names."""
        return [
            value_name(name, value)
            for name, one in self.sets.items()
            for value in ("loss", *one.metrics)
        ]

    def lasting_metrics(self) -> dict[str, Any]:
        """Those that may keep something when they are reset, by name; of named sets, by set."""
        found = {name: one.lasting_metrics() for name, one in self.sets.items()}
        return found.get("", found)


def value_name(name: str, value: str) -> str:
    """Returns what a value of the evaluation set ``name`` is called."""
    return f"{name}/{value}" if name else value


def create_evaluation(
    context: StepContext,
    strategy: tf.distribute.Strategy,
    task: Task,
    per_replica: int,
    most: int | None = None,
) -> Evaluation | None:
    """Creates what ``create_eval_dataset`` and ``create_metrics`` ask for; None without data.

    Args:
        context: of the step
        strategy: whose replicas evaluate
        task: this process's place in the cluster
        per_replica: how many examples a batch of full size holds
        most: how many examples of a set are evaluated; default: all

    Raises:
        SetupError: the hooks return something else than they should.
    """
    hooks = context.hooks
    if hooks.create_eval_dataset is None:
        if hooks.after_eval:
            raise hooks.after_eval[0].reject(
                "there is no evaluation that it could run after; write create_eval_dataset."
            )
        return None
    sets = {}
    for name, data in create_eval_data(hooks, per_replica, most).items():
        metrics, sums = create_metrics(hooks.create_metrics), Sums.create()
        exchanges: list[str] = []
        run_steps = build_run_steps(context, strategy, task, metrics, sums, exchanges)
        sets[name] = EvaluationSet(
            data, metrics, sums, run_steps, exchanges, task.processes, hooks, per_replica
        )
    return Evaluation(sets)


def trace_evaluation(
    evaluation: Evaluation, strategy: tf.distribute.Strategy, variables: list[Any]
) -> None:
    """Traces the graphs of an evaluation without running them: its hooks are checked early.

    Args:
        evaluation: what to trace
        strategy: whose replicas evaluate
        variables: those of the run; the ones that a forward pass writes to, as a stateful layer
            does, are put back after each evaluation
    """
    for one in evaluation.sets.values():
        graph = one.traced(iter(one.data)).graph
        own = [variable for metric in one.metrics.values() for variable in metric.variables]
        mine = {id(plain_variable(variable)) for variable in own}
        others = [variable for variable in variables if id(plain_variable(variable)) not in mine]
        touched, _ = written_variables(strategy, others, graph)
        one.kept = ReplicaCopies(strategy, touched)


def trace_anew(
    evaluation: Evaluation, context: StepContext, strategy: tf.distribute.Strategy, task: Task
) -> None:
    """Lets the next evaluation trace its graphs anew, as layers have been frozen or unfrozen."""
    for one in evaluation.sets.values():
        one.run_steps = build_run_steps(
            context, strategy, task, one.metrics, one.sums, one.exchanges
        )


def evaluate(
    evaluation: Evaluation, sync: Callable[[LoopStatus], LoopStatus] = lambda status: status
) -> dict[str, float] | None:
    """Goes once over the evaluation data, set by set, each process over its part.

    Args:
        evaluation: what to evaluate
        sync: asked about once a second, in a cluster for all processes: a signal in its answer
            ends the evaluation early

    Returns:
        The mean loss per example (plus the extra loss) and the metrics by name, see
        ``Evaluation.names``; None if ended early. In a cluster, over all examples, the same on
        every process. With ``batch_weight`` the loss is the mean by what batches weigh, and NaN if
        that is nothing.

    Raises:
        RunError: the last batch has fewer examples, and the model or a hook cannot take so few; or
            a batch weighs less than nothing.
    """
    found: dict[str, float] = {}
    for name, one in evaluation.sets.items():
        values = _evaluate_set(one, sync)
        if values is None:
            return None
        found |= {value_name(name, value): number for value, number in values.items()}
    return found


def _evaluate_set(
    evaluation: EvaluationSet, sync: Callable[[LoopStatus], LoopStatus]
) -> dict[str, float] | None:
    with evaluation.kept.put_back_after() if evaluation.kept else contextlib.nullcontext():
        try:
            return _evaluate(evaluation, sync)
        except tf.errors.OpError as error:
            if (size := _last_alone_fails(evaluation)) is None:
                raise
            raise RunError(
                f"{evaluation.data.hook}: the last evaluation batch has {size} examples, not "
                f"{evaluation.per_replica}, which do not fit: "
                f"{evaluation.hooks.attribute_error(error, 'the model or the loss')}; each example "
                "is evaluated, so write tf.shape(batch[0])[0] or -1 for the number of examples."
            ) from error


def _last_alone_fails(evaluation: EvaluationSet) -> int | None:
    """Returns how many examples the last batch has, if that is what fails: a full one does not.

    Asked after a failure only; reads the data again. Where processes exchange something, one cannot
    try by itself.
    """
    if evaluation.exchanges and evaluation.processes > 1:
        return None
    dataset = evaluation.data.anew()

    def fails(part: tf.data.Dataset) -> bool:
        try:
            evaluation.run_steps(
                iter(part), tf.constant(1, tf.int64), tf.constant(tf.int64.max, tf.int64)
            )
        except tf.errors.OpError:
            return True
        return False

    try:
        sizes = [int(checked_count(evaluation.hooks.count_examples, batch)) for batch in dataset]
    except tf.errors.OpError:  # of the data's own
        return None
    full = sizes[-1:] == [evaluation.per_replica]
    if not sizes or full or (len(sizes) > 1 and fails(dataset.take(1))):
        return None
    return sizes[-1] if fails(dataset.skip(len(sizes) - 1)) else None


def _evaluate(
    evaluation: EvaluationSet, sync: Callable[[LoopStatus], LoopStatus]
) -> dict[str, float] | None:
    for metric in evaluation.metrics.values():
        metric.reset_state()
    evaluation.sums.reset()
    iterator = iter(evaluation.data)
    run_steps = evaluation.traced(iterator)
    rows = tf.constant(0 if evaluation.exchanges else tf.int64.max, tf.int64)
    # Between processes, a collective takes no other shape in one call than in its first step, and
    # the last batches may be smaller.
    single = evaluation.exchanges and evaluation.processes > 1
    chunk = ChunkLength(most=1 if single else 100_000)
    while True:
        with chunk.timed(chunk.limit) as steps:
            more = bool(run_steps(iterator, tf.constant(steps, tf.int64), rows))
        status = sync(LoopStatus(steps_per_call=chunk.limit, more=more))
        chunk.limit = status.steps_per_call
        if not status.more:
            break
        if status.signal:
            return None
    sums = evaluation.sums.read()
    _check_weights(evaluation, sums)
    examples = sums["examples"]
    values = {"loss": (sums["loss"] + sums["extra_loss"]) / examples if examples else math.nan}
    values |= results(evaluation.metrics, evaluation.hooks.create_metrics)
    return values


def _check_weights(evaluation: EvaluationSet, sums: dict[str, float]) -> None:
    """Refuses weights of batches that are negative or not finite.

    Raises:
        RunError: a batch has one.
    """
    if number := int(sums["refused"]):
        weigh = "a batch weighs" if number == 1 else f"{number} batches together weigh"
        raise RunError(
            f"{evaluation.hooks.batch_weight}: in the evaluation by {evaluation.data.hook.name}, "
            f"{weigh} {sums['refused_weight']:g}; expected a number from 0 up for each."
        )
