"""Rejects hooks, layers and ops that logical replicas cannot support, or do not support yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import keras
import numpy as np
import tensorflow as tf

from ctl_core.cluster.replica_contexts import NO_EXCHANGE
from ctl_core.compat import add_called_ops
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.model.loss_calls import locate_op, refuse_calls_of_collectives
from ctl_core.numerics.randomness import find_random_ops
from ctl_core.numerics.reduction import PIECES
from ctl_core.run.errors import SetupError

_CURE = "leave out logical_replicas"


def refuse_hooks(hooks: Hooks) -> None:
    """Rejects hooks that cannot be combined with logical replicas.

    Raises:
        SetupError: there is such a hook; the message names the hook and gives the reason.
    """
    pieces = [name for name in PIECES if name in hooks.update_pre.arguments]
    if pieces:
        raise hooks.update_pre.reject(
            f"takes {' and '.join(pieces)}, which differ between devices; with "
            "logical_replicas, an update may depend only on sums over all devices: leave out "
            "these arguments or logical_replicas."
        )


def refuse_layers(hooks: Hooks, layers: Iterable[keras.Layer]) -> None:
    """Rejects layers that cannot be combined with logical replicas.

    Raises:
        SetupError: there is such a layer; the message names the layer and gives the reason.
    """
    for layer in layers:
        if getattr(layer, "synchronized", False):
            raise hooks.create_model.reject(
                f"{_name(layer)} is synchronized, which needs all replicas at the same time, but a "
                "device computes logical replicas one after another; leave out one of the "
                "two."
            )


def refuse_stateful_layers(hooks: Hooks, layers: Iterable[keras.Layer], cure: str) -> None:
    """Rejects recurrent layers that keep a state for each row, if a batch has several leaves.

    Args:
        hooks: the hooks of the run
        layers: the layers of the run
        cure: what to do so that there is a single leaf, for the error message

    Raises:
        SetupError: there is such a layer; the message names it.
    """
    for layer in layers:
        if getattr(layer, "stateful", False):
            raise hooks.create_model.reject(
                f"{_name(layer)} is stateful: a row would need its state from the step before, "
                f"which another part of the batch may have computed; leave out stateful=True, or "
                f"{cure}."
            )


def _name(layer: keras.Layer) -> str:
    """Returns the kind and the name of a layer, for error messages."""
    return f"{type(layer).__name__} '{layer.name}'"


def refuse_states(hook: Hook, metrics: Mapping[str, keras.Metric]) -> None:
    """Resets metrics, and rejects metrics whose state cannot be summed or does not start at 0.

    Args:
        hook: the hook that returned the metrics
        metrics: the metrics by name

    Raises:
        SetupError: there is such a metric; the message names it.
    """
    for name, metric in metrics.items():
        for variable in metric.variables:
            dtype = tf.as_dtype(variable.dtype)
            if dtype.is_bool or dtype == tf.string:
                raise hook.reject(
                    f"the state of the metric '{name}' is of dtype {dtype.name}, which logical "
                    "replicas cannot add up; leave out the metric or logical_replicas."
                )
        metric.reset_state()
        if any(np.any(np.asarray(variable) != 0) for variable in metric.variables):
            raise hook.reject(
                f"the state of the metric '{name}' does not start at 0, so logical replicas "
                "cannot add it up; leave out the metric or logical_replicas."
            )


def refuse_ops(hooks: Hooks, graph: tf.Graph) -> None:
    """Rejects collectives between replicas, and random ops whose state cannot be set.

    The whole graph of a step is searched, including hooks that are not part of the forward pass,
    such as ``update_post``.

    Args:
        hooks: the hooks of the run
        graph: the graph of a training step or of an evaluation

    Raises:
        SetupError: there is such an op; the message names the line that created it.
    """
    operations = list(add_called_ops(graph.get_operations()))
    refuse_calls_of_collectives(hooks, operations, NO_EXCHANGE)
    random_types = find_random_ops(graph)
    for op in operations:
        if op.type in random_types:
            raise SetupError(
                f"{locate_op(hooks, op)}: draws random numbers with {op.type}, whose state no "
                "logical replica can set; use a keras.random.SeedGenerator or "
                f"tf.random.stateless_*, or {_CURE}."
            )
