"""A step of an evaluation, in the graph: forward pass, loss and metrics of one batch a replica."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ctl_core.checks.examples import checked_count
from ctl_core.checks.returned import checked_extra, expect
from ctl_core.cluster.strategy import distribute, local_replicas
from ctl_core.cluster.task import Task
from ctl_core.context import StepContext
from ctl_core.metrics import update_metrics
from ctl_core.step import batch_sum, forward, weight_of
from ctl_core.training_mode import inference


@dataclasses.dataclass(frozen=True)
class Sums:
    """Running sums of an evaluation, float64 scalars, added up over the replicas.

    With ``batch_weight`` the examples are what it says they weigh; what a batch cannot weigh is
    counted and added up apart.
    """

    loss: tf.Variable
    extra_loss: tf.Variable
    examples: tf.Variable
    refused: tf.Variable
    refused_weight: tf.Variable

    @classmethod
    def create(cls) -> Sums:
        """Makes them; called in the strategy's scope."""
        return cls(*(_replica_sum(field.name) for field in dataclasses.fields(cls)))

    def reset(self) -> None:
        """Begins anew."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).assign(0.0)

    def read(self) -> dict[str, float]:
        """Returns the sums by name; in a cluster, every process takes part."""
        fields = dataclasses.fields(self)
        return {field.name: float(getattr(self, field.name).read_value()) for field in fields}


def _replica_sum(name: str) -> tf.Variable:
    return tf.Variable(
        0.0,
        dtype=tf.float64,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def build_run_steps(
    context: StepContext,
    strategy: tf.distribute.Strategy,
    task: Task,
    metrics: dict[str, Any],
    sums: Sums,
    exchanges: list[str],
) -> Callable[[Any, tf.Tensor, tf.Tensor], tf.Tensor]:
    """Builds the in-graph loop over the batches of one set of data.

    Every process draws the elements of all replicas and keeps its own, so that each knows, without
    asking, whether all take another step. A replica for which no batch is left takes part in the
    last one with a stand-in, of which nothing counts: the step's first batch, or as many of its
    rows as ``rows`` says. With none, what replicas exchange is of true examples only.
    """
    replicas, local = strategy.num_replicas_in_sync, local_replicas(strategy)

    def on_replica(batch: Any, there: tf.Tensor | None) -> None:
        if there is not None:  # what a condition returns names no device to reduce to
            batch = tf.nest.map_structure(tf.identity, batch, expand_composites=True)
        with _noted(exchanges), inference():
            _update(context, metrics, sums, batch, there)

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
    counted = checked_count(hooks.count_examples, batch)
    examples = tf.cast(counted if weight is None else weight, tf.float64)

    def add(total: tf.Variable, value: tf.Tensor) -> None:
        total.assign_add(value if there is None else tf.where(there, value, tf.zeros_like(value)))

    if weight is not None:
        wrong = tf.logical_not(tf.math.is_finite(examples) & (examples >= 0))
        add(sums.refused, tf.cast(wrong, tf.float64))
        add(sums.refused_weight, tf.where(wrong, examples, tf.zeros_like(examples)))
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
