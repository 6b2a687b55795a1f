"""Evaluation and prediction: each example exactly once, whatever the replicas and remainders."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checks.returned import checked_extra, expect
from ctl_core.chunks import ChunkLength
from ctl_core.cluster.strategy import Task, distribute, local_replicas
from ctl_core.cluster.sync import LoopStatus
from ctl_core.context import StepContext
from ctl_core.errors import RunError
from ctl_core.eval_data import EvaluationData, create_eval_dataset
from ctl_core.hooks import Hooks
from ctl_core.metrics import create_metrics, results, update_metrics
from ctl_core.numerics.staging import ReplicaCopies
from ctl_core.run_state.tracking import plain_variable, written_variables
from ctl_core.step import batch_sum, forward, weight_of


@dataclasses.dataclass(frozen=True)
class Sums:
    """Running sums of an evaluation, float64 scalars, added up over the replicas.

    With ``batch_weight`` the examples are what it says they weigh.
    """

    loss: tf.Variable
    extra_loss: tf.Variable
    examples: tf.Variable


@dataclasses.dataclass
class Evaluation:
    """The evaluation data, the metrics and the graph function that updates them.

    Attributes:
        data: the evaluation data; element = (number of examples, batch)
        metrics: the user's metrics by name
        sums: of the loss, the extra loss and the examples
        run_steps: graph function (iterator, steps, rows) -> whether there may be more; see
            ``_run_steps``
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


def create_evaluation(
    context: StepContext, strategy: tf.distribute.Strategy, task: Task, per_replica: int
) -> Evaluation | None:
    """Creates what ``create_eval_dataset`` and ``create_metrics`` ask for; None without data.

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
    data = create_eval_dataset(hooks, per_replica)
    metrics = create_metrics(hooks.create_metrics)
    sums = Sums(*(_replica_sum(name) for name in ("loss", "extra_loss", "examples")))
    exchanges: list[str] = []
    run_steps = _run_steps(context, strategy, task, metrics, sums, exchanges)
    return Evaluation(data, metrics, sums, run_steps, exchanges, task.processes, hooks, per_replica)


def _replica_sum(name: str) -> tf.Variable:
    return tf.Variable(
        0.0,
        dtype=tf.float64,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _run_steps(
    context: StepContext,
    strategy: tf.distribute.Strategy,
    task: Task,
    metrics: dict[str, Any],
    sums: Sums,
    exchanges: list[str],
) -> Callable[[Any, tf.Tensor, tf.Tensor], tf.Tensor]:
    """Builds the in-graph loop.

    Every process draws the elements of all replicas and keeps its own, so that each knows, without
    asking, whether all take another step. A replica for which no batch is left takes part in the
    last one with a stand-in, of which nothing counts: the step's first batch, or as many of its
    rows as ``rows`` says. With none, what replicas exchange is of true examples only.
    """
    replicas, local = strategy.num_replicas_in_sync, local_replicas(strategy)

    def on_replica(element: Any, there: tf.Tensor | None) -> None:
        if there is not None:  # what a condition returns names no device to reduce to
            element = tf.nest.map_structure(tf.identity, element, expand_composites=True)
        examples, batch = element
        with _noted(exchanges):
            _update(context, metrics, sums, examples, batch, there)

    def step(iterator: Any, first: Any, rows: tf.Tensor) -> tf.Tensor:
        if replicas == 1:
            strategy.run(on_replica, args=(first.get_value(), None))
            return tf.constant(True)
        drawn = [first, *(iterator.get_next_as_optional() for _ in range(1, replicas))]
        own = drawn[task.index :: replicas // local]
        stand_in = tf.nest.map_structure(lambda part: _cut(part, rows), first.get_value())
        there = [one.has_value() for one in own]
        batches = [
            tf.cond(is_there, one.get_value, lambda: stand_in)
            for is_there, one in zip(there, own, strict=True)
        ]
        strategy.run(on_replica, args=(distribute(strategy, batches), distribute(strategy, there)))
        return tf.constant(True)

    @tf.function(autograph=False, reduce_retracing=True)
    def run_steps(iterator: Any, steps: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        def body(done: tf.Tensor, more: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            first = iterator.get_next_as_optional()
            more = tf.cond(
                first.has_value(), lambda: step(iterator, first, rows), lambda: tf.constant(False)
            )
            return done + 1, more

        _, more = tf.while_loop(
            lambda done, more: (done < steps) & more,
            body,
            (tf.constant(0, tf.int64), tf.constant(True)),
        )
        return more

    return run_steps  # type: ignore[no-any-return]


def _cut(part: Any, rows: tf.Tensor) -> Any:
    """Returns the first ``rows`` rows, or all, of what has no fixed number of them."""
    if part.shape.rank == 0 or part.shape[0] is not None:
        return part
    if isinstance(part, tf.SparseTensor):
        size = tf.concat([tf.minimum(part.dense_shape[:1], rows), part.dense_shape[1:]], 0)
        return tf.sparse.slice(part, tf.zeros_like(size), size)
    return part[:rows]


@contextlib.contextmanager
def _noted(exchanges: list[str]) -> Iterator[None]:
    """Notes whether this replica, while it is traced, exchanges anything with the others.

    ``merge_call`` is what all of a replica context's exchanges are made of.
    """
    context = tf.distribute.get_replica_context()
    merge_call = context.merge_call

    def noting(*args: Any, **kwargs: Any) -> Any:
        exchanges.append("merge_call")
        return merge_call(*args, **kwargs)

    context.merge_call = noting
    try:
        yield
    finally:
        del context.merge_call


def _update(
    context: StepContext,
    metrics: dict[str, Any],
    sums: Sums,
    examples: tf.Tensor,
    batch: Any,
    there: tf.Tensor | None,
) -> None:
    """Adds one replica's batch to the metrics and sums.

    Hooks are called in the replica's own graph, where they can exchange values with the other
    replicas; a stand-in (``there`` is False) must only not count.
    """
    hooks = context.hooks
    output, loss = forward(context, batch, training=False)
    values = {"output": output, "batch": batch, **context.hook_arguments()}
    where = str(hooks.eval_pre)
    returned = hooks.eval_pre.in_graph(loss=loss, **values)
    loss_per_batch, extra_loss = expect(returned, ("loss_per_batch", "extra_loss"), where)
    extra = checked_extra(hooks.create_model, context.train_model, extra_loss, tf.float64, where)
    weight = weight_of(context, batch, output)
    examples = tf.cast(examples if weight is None else weight, tf.float64)

    def add(total: tf.Variable, value: tf.Tensor) -> None:
        total.assign_add(value if there is None else tf.where(there, value, tf.zeros_like(value)))

    add(sums.loss, tf.cast(batch_sum(context, loss_per_batch, batch), tf.float64))
    add(sums.extra_loss, extra * examples)
    add(sums.examples, examples)
    if not metrics:
        return
    arguments = hooks.metric_pre.in_graph(
        output=output, batch=batch, train_model=context.train_model
    )

    def update() -> None:
        update_metrics(metrics, hooks.create_metrics, hooks.metric_pre, arguments)

    if there is None:
        update()
    else:
        tf.cond(there, update, lambda: None)


def trace_evaluation(
    evaluation: Evaluation, strategy: tf.distribute.Strategy, variables: list[Any]
) -> None:
    """Traces the graph of an evaluation without running it: its hooks are checked early.

    Args:
        evaluation: what to trace
        strategy: whose replicas evaluate
        variables: those of the run; the ones that a forward pass writes to, as a stateful layer
            does, are put back after each evaluation
    """
    graph = evaluation.traced(iter(evaluation.data)).graph
    own = [variable for metric in evaluation.metrics.values() for variable in metric.variables]
    mine = {id(plain_variable(variable)) for variable in own}
    others = [variable for variable in variables if id(plain_variable(variable)) not in mine]
    touched, _ = written_variables(strategy, others, graph)
    evaluation.kept = ReplicaCopies(strategy, touched)


def evaluate(
    evaluation: Evaluation, sync: Callable[[LoopStatus], LoopStatus] = lambda status: status
) -> dict[str, float] | None:
    """Goes once over the evaluation data, each process over its part.

    Args:
        evaluation: what to evaluate
        sync: asked about once a second, in a cluster for all processes: a signal in its answer
            ends the evaluation early

    Returns:
        The mean loss per example (plus the extra loss) and the metrics by name; None if ended
        early. In a cluster, over all examples, the same on every process. With ``batch_weight`` the
        loss is the mean by what batches weigh, and NaN if that is nothing.

    Raises:
        RunError: the last batch has fewer examples, and the model or a hook cannot take so few.
    """
    with evaluation.kept.put_back_after() if evaluation.kept else contextlib.nullcontext():
        try:
            return _evaluate(evaluation, sync)
        except tf.errors.OpError as error:
            if (size := _last_alone_fails(evaluation)) is None:
                raise
            hook = evaluation.hooks.create_eval_dataset
            assert hook is not None
            raise RunError(
                f"{hook}: the last evaluation batch has {size} examples, not "
                f"{evaluation.per_replica}, which do not fit: "
                f"{evaluation.hooks.attribute_error(error, 'the model or the loss')}; each example "
                "is evaluated, so write tf.shape(batch[0])[0] or -1 for the number of examples."
            ) from error


def _last_alone_fails(evaluation: Evaluation) -> int | None:
    """Returns how many examples the last batch has, if that is what fails: a full one does not.

    Asked after a failure only; reads the data again. Where processes exchange something, one cannot
    try by itself.
    """
    if evaluation.exchanges and evaluation.processes > 1:
        return None
    dataset = evaluation.data.dataset

    def fails(part: tf.data.Dataset) -> bool:
        try:
            evaluation.run_steps(
                iter(part), tf.constant(1, tf.int64), tf.constant(tf.int64.max, tf.int64)
            )
        except tf.errors.OpError:
            return True
        return False

    try:
        sizes = [int(examples) for examples, _ in dataset]
    except tf.errors.OpError:  # of the data's own
        return None
    full = sizes[-1:] == [evaluation.per_replica]
    if not sizes or full or (len(sizes) > 1 and fails(dataset.take(1))):
        return None
    return sizes[-1] if fails(dataset.skip(len(sizes) - 1)) else None


def _evaluate(
    evaluation: Evaluation, sync: Callable[[LoopStatus], LoopStatus]
) -> dict[str, float] | None:
    for metric in evaluation.metrics.values():
        metric.reset_state()
    sums = evaluation.sums
    for total in (sums.loss, sums.extra_loss, sums.examples):
        total.assign(0.0)
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
    examples = float(sums.examples.read_value())
    loss = float(sums.loss.read_value()) + float(sums.extra_loss.read_value())
    values = {"loss": loss / examples if examples else math.nan}
    values |= results(evaluation.metrics, evaluation.hooks.create_metrics)
    return values
