"""Checks before training that losses, and weights of batches, are sums over a batch.

A loss that is one number could be a mean, which would make gradients smaller by the batch size.
Only its values tell: the gradient of a sum over a batch equals the sum of the gradients of its
halves; that of a mean is half of it. The ratio is compared, not equality, because noise, label
smoothing and negatives from within the batch shift it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ctl_core.cluster.replica_contexts import LoneReplica
from ctl_core.compat import add_called_ops, get_seed_generator, run_replica
from ctl_core.hooks.hooks import Hook
from ctl_core.input.batches import count_rows, find_first_replica, take_rows
from ctl_core.model.components import SINGLE_OBJECTIVE, StepContext, TraceContext
from ctl_core.model.copies import ReplicaCopies
from ctl_core.model.forward import compute_objectives, run_model, weigh_batch
from ctl_core.model.state import State
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.run.console import Console
from ctl_core.types import Batch

# How many batches are tried, and how many rows of each.
_BATCHES = 3
_MAX_ROWS = 64
# How many rows are weighed one by one.
_MAX_WEIGHED_ROWS = 8
# How many times a batch is tried if the loss draws random numbers.
_DRAWS = 20
# The ratio of a mean is 0.5; noise and smoothing shift it within these limits.
_MIN_RATIO_OF_MEAN = 0.45
_MAX_RATIO_OF_MEAN = 0.55
# The ratio of a sum is 1. Up to this ratio, a loss is no sum over the examples.
_MAX_RATIO_OF_WHOLE = 0.85


class Comparison(NamedTuple):
    """The result for a batch, and the sum of the results for its parts; both are squared.

    Attributes:
        together: the result for the batch
        apart: the sum of the results for its halves, or for its rows
    """

    together: float | tf.Tensor
    apart: float | tf.Tensor


class Comparisons(NamedTuple):
    """The comparisons of a batch with its parts.

    Attributes:
        losses: compares the norm of the gradient by objective
        weight: compares the result of ``batch_weight``; None without that hook
    """

    losses: dict[str, Comparison]
    weight: Comparison | None


class Ratios(NamedTuple):
    """The ratios of results for batches to those of their parts, one for each batch.

    Attributes:
        losses: by objective, NaN where there is no gradient
        weights: of the results of ``batch_weight``
    """

    losses: dict[str, list[float]]
    weights: list[float]


def check_losses(state: State, console: Console) -> None:
    """Compares the losses of some batches with those of their halves, and weights with rows'.

    Costs nothing if each example has a loss and no hook weighs batches. Otherwise it takes small
    graphs and another call of ``create_dataset``. A batch that cannot be tried gives no verdict.
    Nothing is changed.

    Raises:
        SetupError: a loss is a mean, or a weight is no sum.
    """
    components = state.components
    has_weight = state.hooks.batch_weight is not None
    if not components.shape.by_rows or not (components.scalar_losses or has_weight):
        return
    try:
        with keep_seeds():
            ratios = _try_batches(state)
    except Exception:  # half a batch may not work; training reports any real problem
        return
    if state.hooks.batch_weight is not None:
        for ratio in ratios.weights:
            _check_weight(state.hooks.batch_weight, ratio)
    for objective, loss_ratios in ratios.losses.items():
        _check_loss(state, objective, float(np.median(loss_ratios)), console)


def _check_weight(hook: Hook, ratio: float) -> None:
    """Refuses a ``batch_weight`` whose results are no sums over the examples."""
    if ratio < _MAX_RATIO_OF_WHOLE or ratio * _MAX_RATIO_OF_WHOLE > 1:
        raise hook.reject(
            f"some examples together weigh {ratio:.2f} times what they do one by one; return a "
            "sum, which may be 0, and no mean or maximum."
        )


def _check_loss(state: State, objective: str, ratio: float, console: Console) -> None:
    """Refuses a loss that is a mean; warns of another one that is no sum over the examples."""
    hook = state.hooks.grad_pre
    if objective in state.components.unchanged_losses:
        hook = state.hooks.create_loss
    loss = "the loss"
    if objective != SINGLE_OBJECTIVE:
        loss += f" of {objective!r}"
    evidence = f"a batch's gradient is {ratio:.2f} times that of its halves"
    if _MIN_RATIO_OF_MEAN <= ratio <= _MAX_RATIO_OF_MEAN:
        raise hook.reject(
            f"{loss} is a mean: {evidence}; return one number per example (Keras: "
            "reduction='none', targets [b, 1])."
        )
    if _MIN_RATIO_OF_MEAN <= ratio <= _MAX_RATIO_OF_WHOLE:
        console.warn(
            f"{hook}: {loss} is of a batch as a whole: {evidence}. It depends on devices, unless "
            "these exchange what it is made of, by ctl_core.all_gather or all_reduce."
        )


def _try_batches(state: State) -> Ratios:
    """Compares some batches with their parts; restores the variables afterwards."""
    generator = get_seed_generator()
    context = TraceContext(state.components, quiet=True)
    strategy = state.strategy

    @tf.function(autograph=False)
    def try_batch(batch: Batch, half: int) -> Comparisons:
        with LoneReplica(strategy, find_first_replica(strategy)), run_replica(generator):
            return compare_with_parts(context, batch, half)

    tried = []
    for batch in state.data.make_pass().take(_BATCHES):
        rows = int(count_rows(batch))
        if rows > 1:
            tried.append((batch, min(rows, _MAX_ROWS) // 2))
    ratios = Ratios(collections.defaultdict(list), [])
    with strategy.scope():
        graph = try_batch.get_concrete_function(*tried[0]).graph
        copies = ReplicaCopies(strategy, state.recording.find_written(graph, strategy))
        draws = 1
        if has_random_ops(add_called_ops(graph.get_operations())):
            draws = _DRAWS
        with copies.put_back_after():
            for batch, half in tried:
                drawn = [try_batch(batch, half) for _ in range(draws)]
                for objective in drawn[0].losses:
                    ratio = _divide([comparisons.losses[objective] for comparisons in drawn])
                    ratios.losses[objective].append(ratio)
                if drawn[0].weight is not None:
                    ratios.weights.append(_divide([comparisons.weight for comparisons in drawn]))
    return ratios


def _divide(comparisons: list[Comparison]) -> float:
    """Returns the ratio of the result for a batch to that of its parts, over all draws."""
    together, apart = np.sum(comparisons, axis=0)
    if apart == 0:
        return np.nan
    return float(np.sqrt(together / apart))


def compare_with_parts(context: StepContext, batch: Batch, half: int) -> Comparisons:
    """Compares the first rows of a batch with their halves, in a graph.

    Args:
        context: of a step, without a turn
        batch: the batch
        half: how many rows a half has
    """
    losses: dict[str, Comparison] = {}
    weight = None
    for turn in context.list_turns():
        if context.components.scalar_losses:
            halves = [_take(batch, 0, half), _take(batch, half, half)]
            together = _measure_gradients(turn, [_take(batch, 0, 2 * half)])
            apart = _measure_gradients(turn, halves)
            for objective in together:
                comparison = Comparison(together[objective], apart[objective])
                losses[objective] = _add(losses.get(objective), comparison)
        if context.hooks.batch_weight is not None:
            rows = min(2 * half, _MAX_WEIGHED_ROWS)
            weight = _add(weight, _compare_weight(turn, batch, rows))
    return Comparisons(losses, weight)


def _add(total: Comparison | None, comparison: Comparison) -> Comparison:
    """Adds the comparison of a turn to those of the turns before, if there are any."""
    if total is None:
        return comparison
    return Comparison(total.together + comparison.together, total.apart + comparison.apart)


def _take(batch: Batch, first: int, rows: int) -> Batch:
    """Returns some rows of a batch."""
    return tf.nest.map_structure(lambda tensor: take_rows(tensor, first, rows), batch)


def _measure_gradients(context: StepContext, batches: list[Batch]) -> dict[str, tf.Tensor]:
    """Returns by objective the squared norm of the gradient of the sum of the batches' losses."""
    scalar_losses = context.components.scalar_losses
    with tf.GradientTape(persistent=True) as tape:
        tried = [compute_objectives(context, batch, 1, 0).objectives for batch in batches]
        totals = {
            objective: tf.add_n([objectives[objective].value for objectives in tried])
            for objective in scalar_losses & tried[0].keys()
        }
    norms = {}
    for objective, total in totals.items():
        gradients = tape.gradient(total, tried[0][objective].variables)
        norms[objective] = tf.cast(tf.linalg.global_norm(gradients), tf.float64) ** 2
    return norms


def _compare_weight(context: StepContext, batch: Batch, rows: int) -> Comparison:
    """Compares the weight of some rows of a batch with the sum of their weights."""
    together = _weigh(context, _take(batch, 0, rows))
    one_by_one = [_weigh(context, _take(batch, row, 1)) for row in range(rows)]
    return Comparison(together**2, tf.add_n(one_by_one) ** 2)


def _weigh(context: StepContext, batch: Batch) -> tf.Tensor:
    """Returns the weight of a batch; runs the model only if ``batch_weight`` takes its output."""
    hook = context.hooks.batch_weight
    output = None
    if hook is not None and "output" in hook.arguments:
        output = run_model(context, batch, training=True)
    return tf.cast(weigh_batch(context, batch, output, None), tf.float64)


def has_random_ops(operations: Iterable[tf.Operation]) -> bool:
    """Returns whether any op of some graphs draws random numbers."""
    kinds = ("Random", "TruncatedNormal", "Multinomial")
    return any(kind in op.type for op in operations for kind in kinds)
