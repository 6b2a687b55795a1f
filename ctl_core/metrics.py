"""Keras metrics that hooks make: checked, updated in the graph, and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from ctl_core.checks.returned import kind_of
from ctl_core.context import StepContext
from ctl_core.errors import HookFailed, RunError, brief
from ctl_core.hooks import Hook
from ctl_core.numerics.shares import if_counted

Metrics = dict[str, keras.Metric]


def create_metrics(hook: Hook) -> Metrics:
    """Calls a hook that makes metrics; in the strategy's scope.

    Raises:
        SetupError: it returns something else than a dict of Keras metrics by name.
    """
    metrics = hook()
    if not isinstance(metrics, dict):
        raise hook.reject(f"returned a {type(metrics).__name__}, expected a dict by name.")
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise hook.reject(f"the name {name!r} is {kind_of(name)}, expected a text.")
        if not isinstance(metric, keras.Metric):
            raise hook.reject(f"'{name}' is a {type(metric).__name__}, expected a Keras metric.")
        if name == "loss":
            raise hook.reject("'loss' is the engine's own; choose another name.")
    return metrics


def update_metrics(metrics: Metrics, made_by: Hook, hook: Hook, arguments: Any) -> None:
    """Updates each metric with what a hook returned for it.

    Args:
        metrics: by name
        made_by: the hook that made them
        hook: the hook that returned ``arguments``
        arguments: those of ``update_state`` for all metrics, or a dict of such by metric

    Raises:
        SetupError: a metric has none.
        HookFailed: a metric refuses them.
    """
    for name, metric in metrics.items():
        own = arguments
        if isinstance(arguments, Mapping):
            if name not in arguments:
                raise hook.reject(
                    f"returned nothing for the metric '{name}' of {made_by.name}, only for "
                    f"{', '.join(map(repr, arguments))}."
                )
            own = arguments[name]
        try:
            metric.update_state(*(own if isinstance(own, tuple | list) else (own,)))
        except Exception as error:
            raise HookFailed(
                f"{hook}: update_state of the metric '{name}' refuses what it returned: "
                f"{brief(error)}"
            ) from error


def update_train_metrics(context: StepContext, batch: Any, output: Any, loss: Any) -> None:
    """Updates the train metrics, of this replica's examples, if there are any."""
    hooks = context.hooks
    if not context.train_metrics:
        return
    values = {"loss": loss, "output": output, "batch": batch, **context.hook_arguments()}
    arguments = hooks.train_metric_pre.in_graph(**values)

    def update() -> None:
        made_by = hooks.create_train_metrics
        update_metrics(context.train_metrics, made_by, hooks.train_metric_pre, arguments)

    if_counted(update)


def results(metrics: Metrics, made_by: Hook) -> dict[str, float]:
    """Returns the values by name; in a cluster, every process takes part.

    Raises:
        RunError: one is no single number.
    """
    values = {}
    for name, metric in metrics.items():
        result = np.asarray(metric.result())
        if result.size != 1:
            raise RunError(
                f"{made_by.name}: the result of '{name}' has shape {list(result.shape)}, expected "
                "a single number."
            )
        values[name] = float(result.reshape(()))
    return values
