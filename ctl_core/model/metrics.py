"""Keras metrics that hooks make: updated in the graph, and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.hooks.hooks import Hook
from ctl_core.model.parts import Moment, Parts
from ctl_core.run.console import Console
from ctl_core.run.errors import HookFailed, RunError, brief, nearest

Metrics = Mapping[str, keras.Metric]


def update_metrics(metrics: Metrics, hook: Hook, arguments: Any, present: tf.Tensor | None) -> None:
    """Updates metrics with what a hook returned, unless a replica has no rows.

    Args:
        metrics: by name
        hook: the hook that returned ``arguments``
        arguments: those of ``update_state`` for all metrics, or a dict of such by metric
        present: whether the replica has rows, a scalar bool; None: that is sure

    Raises:
        SetupError: there is no such metric.
        HookFailed: a metric refuses its arguments.
    """
    if not isinstance(arguments, Mapping):
        arguments = dict.fromkeys(metrics, arguments)
    for name, own in arguments.items():
        if name not in metrics:
            raise hook.reject(
                f"returned something for '{name}', which is no metric{nearest(name, metrics)} "
                f"(there: {', '.join(metrics)})."
            )
        values = widen(metrics[name], own if isinstance(own, tuple | list) else (own,))
        try:
            update_if(present, metrics[name].update_state, *values)
        except Exception as error:
            raise HookFailed(
                f"{hook}: update_state of the metric '{name}' refuses what it returned: "
                f"{brief(error)}"
            ) from error


def widen(metric: keras.Metric, arguments: Sequence[Any]) -> Sequence[Any]:
    """Returns two vectors [b], of true and predicted values, as [b, 1] to a metric of Keras.

    Keras would take a vector for one example, and its mean for that example's value.
    """
    pair = [part for part in arguments[:2] if tf.is_tensor(part) and part.shape.rank == 1]
    if len(pair) < 2 or not type(metric).update_state.__module__.startswith("keras."):
        return arguments
    return [*(tf.expand_dims(part, 1) for part in pair), *arguments[2:]]


def update_if(present: tf.Tensor | None, update: Callable[..., Any], *values: Any) -> None:
    """Updates a metric, unless this replica has no rows: a stand-in counts nowhere."""
    if present is None:
        update(*values)
    else:
        tf.cond(present, lambda: (update(*values), None)[1], lambda: None)


def update_train_metrics(
    parts: Parts,
    moment: Moment,
    loss_parts: Mapping[str, Any],
    made: Mapping[str, Any],
    present: tf.Tensor | None,
) -> None:
    """Adds the examples of a replica to the train metrics, and to the means of the loss's parts.

    Args:
        parts: of the step
        moment: of the step
        loss_parts: numbers of the examples, or of all of them, by name
        made: loss, output and batch
        present: whether the replica has rows, a scalar bool; None: that is sure
    """
    hook = parts.hooks.train_metric_pre
    if parts.train_metrics:
        arguments = hook.in_graph(**made, **parts.values(moment))
        update_metrics(parts.train_metrics, hook, arguments, present)
    for name, value in loss_parts.items() if parts.loss_parts else ():
        examples = parts.count_examples(made["batch"])
        weight = 1 if examples is None else examples
        update_if(present, parts.loss_parts[name].update_state, tf.reduce_mean(value), weight)


def read_results(metrics: Metrics, made_by: Hook) -> dict[str, float]:
    """Returns the values by name; in a cluster, every process takes part.

    Raises:
        RunError: one is no single number.
    """
    values = {name: np.asarray(metric.result()) for name, metric in metrics.items()}
    for name, value in values.items():
        if value.size != 1:
            raise RunError(
                f"{made_by.name}: the result of '{name}' has shape {list(value.shape)}, expected "
                "a single number."
            )
    return {name: float(value.item()) for name, value in values.items()}


def log_metrics(parts: Parts, console: Console, step: int, due: bool, anew: bool) -> None:
    """Writes the train metrics, if that is due; at the end of a period they begin anew.

    A run that ends within one keeps what it has, for when it goes on.
    """
    metrics = parts.logged()
    if due:
        console.values(step, "train", read_results(metrics, parts.hooks.create_train_metrics))
    for metric in metrics.values() if anew else ():
        metric.reset_state()
