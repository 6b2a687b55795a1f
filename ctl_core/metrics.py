"""Keras metrics that hooks make: checked, updated in the graph, and read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.checks.examples import examples_in
from ctl_core.checks.returned import kind_of, something
from ctl_core.console import Console
from ctl_core.errors import HookFailed, RunError, brief
from ctl_core.hooks import Hook
from ctl_core.model.parts import Moment, Parts
from ctl_core.settings import nearest

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
            metric.update_state(*widen(metric, own if isinstance(own, tuple | list) else (own,)))
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


def update_train_metrics(
    parts: Parts, moment: Moment, batch: Any, output: Any, loss: Any, present: tf.Tensor | None
) -> set[str]:
    """Updates the train metrics, of this replica's examples, if there are any.

    Returns:
        Those that were. In a turn, ``train_metric_pre`` may leave some out.
    """
    hooks, metrics = parts.hooks, dict(parts.train_metrics)
    if not metrics:
        return set()
    values = {"loss": loss, "output": output, "batch": batch, **parts.values(moment)}
    arguments = hooks.train_metric_pre.in_graph(**values)
    if arguments is None:
        raise hooks.train_metric_pre.reject(
            "returned nothing; is a return missing? In a turn without metrics, return {}."
        )
    if moment.turn is not None and isinstance(arguments, Mapping):
        if wrong := [name for name in arguments if name not in metrics]:
            raise hooks.train_metric_pre.reject(
                f"returned something for '{wrong[0]}', which is no metric"
                f"{nearest(wrong[0], metrics)} (there: {', '.join(metrics)})."
            )
        metrics = {name: metric for name, metric in metrics.items() if name in arguments}
    made_by, pre = hooks.create_train_metrics, hooks.train_metric_pre
    update_if(present, lambda: update_metrics(metrics, made_by, pre, arguments))
    return set(metrics)


def update_if(present: tf.Tensor | None, update: Callable[[], Any]) -> None:
    """Updates metrics, unless this replica has no rows: a stand-in counts nowhere."""
    if present is None:
        update()
    else:
        tf.cond(present, lambda: (update(), None)[1], lambda: None)


def create_loss_parts(hook: Hook, parts: Iterable[str], taken: Iterable[str]) -> Metrics:
    """Makes what the parts of the loss that ``grad_pre`` returns are logged by.

    Args:
        hook: ``grad_pre``
        parts: their names
        taken: names of train metrics

    Raises:
        SetupError: a name is another metric's.
    """
    names = list(dict.fromkeys(parts))
    for name in names:
        if name in {"loss", *taken}:
            raise hook.reject(f"returned a part called '{name}', as another metric is.")
    return {name: keras.metrics.Mean(name) for name in names}


def update_loss_parts(
    parts: Parts,
    moment: Moment,
    loss_parts: Mapping[str, Any],
    batch: Any,
    present: tf.Tensor | None,
) -> None:
    """Adds the parts of the loss: the mean over the examples, of scalars by their number.

    Raises:
        SetupError: a part has another shape, or was not there in the first trace.
    """
    hook = parts.hooks.grad_pre
    for name, value in loss_parts.items() if parts.loss_parts else ():
        if name not in parts.loss_parts:
            raise hook.reject(f"returned the part '{name}' of the loss, which was not there first.")
        part = tf.convert_to_tensor(something(hook, value, parts.values(moment)))
        real = part.dtype.is_floating or part.dtype.is_integer
        if part.shape.rank not in (0, 1, None) or not real:
            raise hook.reject(
                f"the part '{name}' of the loss has shape {part.shape} and type {part.dtype.name}; "
                "expected one number per example, or one for all of them."
            )
        examples = examples_in(parts.hooks.count_examples, batch)
        weight = 1 if examples is None else examples
        update = parts.loss_parts[name].update_state
        update_if(present, functools.partial(update, tf.reduce_mean(part), weight))


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


def log(parts: Parts, console: Console, step: int, due: bool, anew: bool) -> None:
    """Writes the train metrics, if that is due; at the end of a period they begin anew.

    A run that ends within one keeps what it has, for when it goes on.
    """
    if due:
        values = results(parts.logged(), parts.hooks.create_train_metrics)
        console.values(step, "train", values)
    for metric in parts.logged().values() if anew else ():
        metric.reset_state()
