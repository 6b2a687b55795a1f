"""Updates the Keras metrics of hooks in graphs, and reads their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ctl_core.hooks.hooks import Hook
from ctl_core.model.components import Components, ForwardContext
from ctl_core.run.errors import HookFailed, format_error
from ctl_core.types import Structure

if TYPE_CHECKING:
    from ctl_core.model.forward import ForwardPass

Metrics: TypeAlias = Mapping[str, keras.Metric]

# The arguments of ``update_state``: a tuple or list of arguments, or a single argument.
UpdateArguments: TypeAlias = Structure


def update_metrics(
    metrics: Metrics,
    hook: Hook,
    returned: UpdateArguments | Mapping[str, UpdateArguments],
    present: tf.Tensor | None,
) -> None:
    """Updates metrics with the values that a hook returned, unless the replica has no rows.

    Args:
        metrics: the metrics by name
        hook: the hook that returned the values, which messages name
        returned: the arguments of ``update_state`` for all metrics, or a dict of arguments by
            metric name
        present: whether the replica has rows, a bool scalar; None if it certainly has rows

    Raises:
        HookFailed: a metric rejects its arguments, or there is no metric with a name in the dict.
    """
    if isinstance(returned, Mapping):
        arguments_by_metric = returned
    else:
        arguments_by_metric = dict.fromkeys(metrics, returned)
    for name, arguments in arguments_by_metric.items():
        if name not in metrics:
            raise HookFailed(
                f"{hook}: there is no metric '{name}'; the metrics are {', '.join(metrics)}."
            )
        if not isinstance(arguments, tuple | list):
            arguments = (arguments,)
        try:
            update_if(present, metrics[name].update_state, *widen(metrics[name], arguments))
        except Exception as error:
            raise HookFailed(
                f"{hook}: the metric '{name}' does not accept the returned arguments: "
                f"{format_error(error)}"
            ) from error


def widen(metric: keras.Metric, arguments: Sequence[Structure]) -> Sequence[Structure]:
    """Reshapes vectors of labels and predictions from [b] to [b, 1] for a Keras metric.

    Otherwise, Keras would treat a vector as a single example, whose value is the mean of the
    vector.
    """
    vectors = [value for value in arguments[:2] if tf.is_tensor(value) and value.shape.rank == 1]
    is_of_keras = type(metric).update_state.__module__.startswith("keras.")
    if len(vectors) < 2 or not is_of_keras:
        return arguments
    return [*(tf.expand_dims(vector, 1) for vector in vectors), *arguments[2:]]


def update_if(present: tf.Tensor | None, update: Callable[..., Any], *values: Structure) -> None:
    """Updates a metric, unless this replica has no rows.

    A replica without rows runs on a placeholder batch, which metrics must not count.
    """
    if present is None:
        update(*values)
        return

    def update_metric() -> None:
        update(*values)

    tf.cond(present, update_metric, lambda: None)


def update_train_metrics(
    context: ForwardContext, forward: ForwardPass, present: tf.Tensor | None
) -> None:
    """Adds the examples of a replica to the training metrics and to the means of logged values.

    A logged value is one number per example, or one number for all examples of the replica.
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
    # In the trace that creates the variables, the means of logged values do not exist yet, because
    # their names are known only after this trace.
    if not isinstance(components, Components):
        return
    logged: dict[str, tf.Tensor] = {}
    for objective in forward.objectives.values():
        logged |= objective.logged
    for name, value in logged.items():
        examples = components.count_examples(forward.batch)
        mean = components.loss_metrics[name]
        update_if(present, mean.update_state, tf.reduce_mean(value), examples)


def _select_train_metrics(
    metrics: Metrics, hook: Hook, arguments: Mapping[str, UpdateArguments]
) -> dict[str, UpdateArguments]:
    """Selects the arguments of the training metrics from those that ``metric_pre`` returned.

    Raises:
        HookFailed: there are no arguments for a training metric.
    """
    for name in metrics:
        if name not in arguments:
            raise HookFailed(
                f"{hook}: it returns no arguments for the metric '{name}' of "
                "create_train_metrics; add them, or write train_metric_pre."
            )
    return {name: arguments[name] for name in metrics}


class Results(NamedTuple):
    """The results of metrics.

    Attributes:
        scalars: numbers by name. If the result of a metric ``f1`` is a vector, its entries are
            called ``f1/0``, ``f1/1`` and so on. If the result is a dict, the names end with its
            keys: ``f1/KEY``.
        arrays: results with two or more dimensions, such as a confusion matrix, by metric name
    """

    scalars: dict[str, float]
    arrays: dict[str, np.ndarray]


def read_results(metrics: Metrics) -> Results:
    """Returns the results of metrics. In a cluster, every process has to call this function."""
    results = Results({}, {})
    for name, metric in metrics.items():
        _add_result(results, name, metric.result())
    return results


def _add_result(results: Results, name: str, value: Structure) -> None:
    """Adds a metric's result to ``results``: a number, the entries of a vector, or an array."""
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


def name_scalars(name: str, value: Structure) -> list[str]:
    """Returns the names of the scalars in a metric's result, see ``Results``.

    Args:
        name: the name of the metric
        value: the result of the metric; it may be a symbolic tensor, because only its shape is used
    """
    if isinstance(value, Mapping):
        return [
            scalar
            for key, entry in value.items()
            for scalar in name_scalars(f"{name}/{key}", entry)
        ]
    shape = tf.TensorShape(tf.convert_to_tensor(value).shape)
    size = shape.num_elements()
    if size == 1:
        return [name]
    if shape.rank == 1 and size is not None:
        return [f"{name}/{index}" for index in range(size)]
    return []
