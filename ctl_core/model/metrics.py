"""Keras metrics that hooks make: updated in the graph, and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ctl_core.hooks.hooks import Hook
from ctl_core.model.components import Components, ForwardContext
from ctl_core.run.errors import HookFailed, format_error

if TYPE_CHECKING:
    from ctl_core.model.forward import ForwardPass

Metrics = Mapping[str, keras.Metric]


def update_metrics(metrics: Metrics, hook: Hook, arguments: Any, present: tf.Tensor | None) -> None:
    """Updates metrics with what a hook returned, unless a replica has no rows.

    Args:
        metrics, hook: by name; the hook that returned ``arguments``
        arguments: those of ``update_state`` for all metrics, or a dict of such by metric
        present: whether the replica has rows, a scalar bool; None: that is sure

    Raises:
        HookFailed: a metric refuses its arguments, or there is none of a name.
    """
    if not isinstance(arguments, Mapping):
        arguments = dict.fromkeys(metrics, arguments)
    for name, own in arguments.items():
        if name not in metrics:
            raise HookFailed(f"{hook}: '{name}' is none of the metrics {', '.join(metrics)}.")
        values = own if isinstance(own, tuple | list) else (own,)
        try:
            update_if(present, metrics[name].update_state, *widen(metrics[name], values))
        except Exception as error:
            said = f"the metric '{name}' refuses what it returned: {format_error(error)}"
            raise HookFailed(f"{hook}: {said}") from error


def widen(metric: keras.Metric, arguments: Sequence[Any]) -> Sequence[Any]:
    """Returns two vectors [b], of true and predicted values, as [b, 1] to a metric of Keras.

    Keras would take a vector for one example, and its mean for that example's value.
    """
    pair = [part for part in arguments[:2] if tf.is_tensor(part) and part.shape.rank == 1]
    if len(pair) < 2 or not type(metric).update_state.__module__.startswith("keras."):
        return arguments
    return [*(tf.expand_dims(part, 1) for part in pair), *arguments[2:]]


def update_if(present: tf.Tensor | None, update: Callable[..., Any], *values: Any) -> None:
    """Updates a metric, unless this replica has no rows: a placeholder batch counts nowhere."""
    if present is None:
        update(*values)
        return

    def update_metric() -> None:
        update(*values)

    tf.cond(present, update_metric, lambda: None)


def update_train_metrics(
    context: ForwardContext, forward: ForwardPass, present: tf.Tensor | None
) -> None:
    """Adds the examples of a replica to the training metrics and to the means of logged parts.

    A logged part is one number per example, or one number for all examples of the replica.
    """
    components = context.components
    if components.train_metrics:
        hook = context.hooks.train_metric_pre
        arguments = hook.trace(
            loss=forward.loss, output=forward.output, batch=forward.batch, **context.hook_values()
        )
        if hook is context.hooks.metric_pre and isinstance(arguments, Mapping):
            arguments = _select_train_metrics(components.train_metrics, hook, arguments)
        update_metrics(components.train_metrics, hook, arguments, present)
    # While variables are created there are no such means yet: their names are not known.
    if not isinstance(components, Components):
        return
    logged: dict[str, Any] = {}
    for objective in forward.objectives.values():
        logged |= objective.logged
    for name, value in logged.items():
        examples = components.count_examples(forward.batch)
        mean = components.loss_metrics[name]
        update_if(present, mean.update_state, tf.reduce_mean(value), examples)


def _select_train_metrics(
    metrics: Metrics, hook: Hook, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of the training metrics from what ``metric_pre`` returned for all.

    Raises:
        HookFailed: there are none for a training metric.
    """
    for name in metrics:
        if name not in arguments:
            raise HookFailed(
                f"{hook}: it returns nothing for the metric '{name}' of create_train_metrics; "
                "add it, or write train_metric_pre."
            )
    return {name: arguments[name] for name in metrics}


class Results(NamedTuple):
    """The results of metrics.

    Attributes:
        scalars: numbers by name. A vector of a metric ``f1`` has the names ``f1/0``, ``f1/1`` …, a
            dict the names of its keys.
        arrays: results of more dimensions, such as a confusion matrix, by the metric's name
    """

    scalars: dict[str, float]
    arrays: dict[str, np.ndarray]


def read_results(metrics: Metrics) -> Results:
    """Returns the results of metrics; in a cluster, every process takes part."""
    results = Results({}, {})
    for name, metric in metrics.items():
        _add_result(results, name, metric.result())
    return results


def _add_result(results: Results, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _add_result(results, f"{name}/{key}", entry)
        return
    array = np.asarray(value)
    if array.size == 1:
        results.scalars[name] = float(array.item())
    elif array.ndim == 1:
        for index, entry in enumerate(array.tolist()):
            results.scalars[f"{name}/{index}"] = float(entry)
    else:
        results.arrays[name] = array


def name_scalars(name: str, value: Any) -> list[str]:
    """Returns the names of the scalars of a metric's result, see ``Results``.

    Args:
        name: of the metric
        value: its result, which may be a tensor of a graph; only the shape matters
    """
    if isinstance(value, Mapping):
        return [
            scalar
            for key, entry in value.items()
            for scalar in name_scalars(f"{name}/{key}", entry)
        ]
    shape = tf.TensorShape(tf.convert_to_tensor(value).shape)
    if shape.num_elements() == 1:
        return [name]
    if shape.rank == 1 and shape.num_elements() is not None:
        return [f"{name}/{index}" for index in range(shape.num_elements())]
    return []
