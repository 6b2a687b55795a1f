"""Checks before training that losses and batch weights are sums over a batch.

A loss that is a single number could be a mean, which would make gradients too small by a factor of
the batch size. Only the values of the loss reveal this: the gradient of a sum over a batch equals
the sum of the gradients of its halves, and the gradient of a mean is half of that sum. The check
does not require exact equality, because noise, label smoothing and negative examples from within
the batch change the ratio of the two gradients.
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
from ctl_core.model.loss_calls import makes_exchange
from ctl_core.model.state import State
from ctl_core.numerics.not_finite import compute_global_norm
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.run.console import Console
from ctl_core.types import Batch

# The number of batches to try, and the maximum number of rows of each batch.
_BATCHES = 3
_MAX_ROWS = 64
# The maximum number of rows that are weighed one by one.
_MAX_WEIGHED_ROWS = 8
# The number of times that each batch is tried if the loss draws random numbers.
_DRAWS = 20
# If the loss is a mean, the ratio of the gradients is 0.5; with noise and label smoothing, it lies
# within these limits.
_MIN_RATIO_OF_MEAN = 0.45
_MAX_RATIO_OF_MEAN = 0.55
# If the loss is a sum, the ratio of the gradients is 1. Below this limit, the loss is considered
# not to be a sum over the examples.
_MAX_RATIO_OF_WHOLE = 0.85


class Comparison(NamedTuple):
    """A comparison of the result for a batch with the sum of the results for its parts.

    Attributes:
        together: the squared result for the batch
        apart: the square of the sum of the results for its halves, or for its rows
    """

    together: float | tf.Tensor
    apart: float | tf.Tensor


class Comparisons(NamedTuple):
    """The comparisons of a batch with its parts.

    Attributes:
        losses: for each objective, the comparison of the gradient norms
        weight: the comparison of the results of ``batch_weight``; None without that hook
    """

    losses: dict[str, Comparison]
    weight: Comparison | None


class Ratios(NamedTuple):
    """The ratios of the results for batches to the results for their parts, one for each batch.

    Attributes:
        losses: the ratios of gradient norms by objective; NaN if there is no gradient
        weights: the ratios of the results of ``batch_weight``
    """

    losses: dict[str, list[float]]
    weights: list[float]


def check_losses(state: State, console: Console) -> None:
    """Checks with a few batches that losses and batch weights are sums over the examples.

    The gradient of each batch is compared with the gradients of its halves, and its weight with the
    weights of its rows. The check costs nothing if the loss has one number per example and there is
    no hook ``batch_weight``. Otherwise, it traces small graphs and calls ``create_dataset`` once
    more. If a batch cannot be computed, nothing is checked. The state of the run does not change.

    Noise would change the ratios, so the batches are tried without it. Only if that fails, because
    the hooks use ``training`` to tell batches of different structures apart, they are tried with
    noise.

    Raises:
        SetupError: a loss is a mean, or a weight is not a sum.
    """
    components = state.components
    has_weight = state.hooks.batch_weight is not None
    if not components.shape.by_rows or not (components.scalar_losses or has_weight):
        return
    ratios = _try_ratios(state, quiet=True) or _try_ratios(state, quiet=False)
    if ratios is None:
        return
    if state.hooks.batch_weight is not None:
        for ratio in ratios.weights:
            _check_weight(state.hooks.batch_weight, ratio)
    for objective, loss_ratios in ratios.losses.items():
        _check_loss(state, objective, float(np.median(loss_ratios)), console)


def _check_weight(hook: Hook, ratio: float) -> None:
    """Rejects a ``batch_weight`` whose results are not sums over the examples."""
    if ratio < _MAX_RATIO_OF_WHOLE or ratio * _MAX_RATIO_OF_WHOLE > 1:
        raise hook.reject(
            f"the weight of a batch is {ratio:.2f} times the sum of its examples' weights; "
            "return a sum, which may be 0, not a mean or a maximum."
        )


def _check_loss(state: State, objective: str, ratio: float, console: Console) -> None:
    """Rejects a loss that is a mean; warns if it is another value that is not a sum."""
    hook = state.hooks.grad_pre
    if objective in state.components.unchanged_losses:
        hook = state.hooks.create_loss
    loss = "the loss"
    if objective != SINGLE_OBJECTIVE:
        loss += f" {objective!r}"
    evidence = f"a batch's gradient is {ratio:.2f} times its halves'"
    if _MIN_RATIO_OF_MEAN <= ratio <= _MAX_RATIO_OF_MEAN:
        raise hook.reject(
            f"{loss} is a mean: {evidence}; return one number per example (Keras: "
            "reduction='none', targets [b, 1]; Dice: axis=(1, 2, 3))."
        )
    if _MIN_RATIO_OF_MEAN <= ratio <= _MAX_RATIO_OF_WHOLE:
        console.warn(
            f"{hook}: {loss} depends on the whole batch: {evidence}. {_explain_scale(state)} The "
            "loss also depends on the number of devices, unless they exchange the values that it "
            "is computed from, with ctl_core.all_gather or all_reduce."
        )


def _explain_scale(state: State) -> str:
    """Returns sentences about the scale of a loss that is a single number for the whole batch."""
    divisor = f"the global batch size, {state.components.shape.batch}"
    if state.hooks.batch_weight is not None:
        divisor = "the sum of batch_weight"
    return (
        f"A single number counts as the sum over the examples, and is divided by {divisor}, so a "
        "mean over pairs would train too slowly by this factor: return one number per example, or "
        "multiply the mean by the number of rows."
    )


def _try_ratios(state: State, quiet: bool) -> Ratios | None:
    """Returns the ratios, see ``_try_batches``; None if a batch cannot be computed."""
    try:
        with keep_seeds():
            return _try_batches(state, quiet)
    except Exception:  # hooks may fail on half a batch; training reports any real problem
        return None


def _try_batches(state: State, quiet: bool) -> Ratios:
    """Compares some batches with their parts; restores the variables afterwards.

    Args:
        state: the state of the run
        quiet: whether the model runs without noise
    """
    generator = get_seed_generator()
    context = TraceContext(state.components, quiet=quiet)
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
                weights = [pair.weight for pair in drawn if pair.weight is not None]
                if weights:
                    ratios.weights.append(_divide(weights))
    return ratios


def _divide(comparisons: list[Comparison]) -> float:
    """Returns the ratio of the result for a batch to the result for its parts.

    The squares are summed over all draws before the division. Returns NaN if the result for the
    parts is 0.
    """
    together, apart = np.sum(np.array(comparisons), axis=0)
    if apart == 0:
        return np.nan
    return float(np.sqrt(together / apart))


def compare_with_parts(context: StepContext, batch: Batch, half: int) -> Comparisons:
    """Compares the first rows of a batch with parts of these rows; runs in a graph.

    Args:
        context: the context of a step, without a turn
        batch: the batch
        half: the number of rows in each half
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
    """Adds the comparison of a turn to the total of the previous turns, if there are any."""
    if total is None:
        return comparison
    return Comparison(total.together + comparison.together, total.apart + comparison.apart)


def _take(batch: Batch, first: int, rows: int) -> Batch:
    """Returns some rows of a batch."""
    return tf.nest.map_structure(lambda tensor: take_rows(tensor, first, rows), batch)


def _measure_gradients(context: StepContext, batches: list[Batch]) -> dict[str, tf.Tensor]:
    """Returns, by objective, the squared norm of the gradient of the loss.

    The loss is summed over the batches.
    """
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
        norm = compute_global_norm(gradient for gradient in gradients if gradient is not None)
        norms[objective] = tf.cast(norm, tf.float64) ** 2
    return norms


def _compare_weight(context: StepContext, batch: Batch, rows: int) -> Comparison:
    """Compares the weight of the first rows of a batch with the sum of each row's weight.

    If the weight of a row depends on the rows of all replicas, the two may differ, so the weight is
    compared with itself. ``--check`` compares such weights between devices.
    """
    graph = tf.compat.v1.get_default_graph()
    number = len(graph.get_operations())
    together = _weigh(context, _take(batch, 0, rows))
    if makes_exchange(add_called_ops(graph.get_operations()[number:])):
        return Comparison(together**2, together**2)
    one_by_one = [_weigh(context, _take(batch, row, 1)) for row in range(rows)]
    return Comparison(together**2, tf.add_n(one_by_one) ** 2)


def _weigh(context: StepContext, batch: Batch) -> tf.Tensor:
    """Returns the weight of a batch; runs the model only if ``batch_weight`` uses its output."""
    hook = context.hooks.batch_weight
    output = None
    if hook is not None and "output" in hook.arguments:
        output = run_model(context, batch, training=True)
    weight = weigh_batch(context, batch, output, None)
    assert weight is not None  # called only if there is a ``batch_weight``
    return tf.cast(weight, tf.float64)


def has_random_ops(operations: Iterable[tf.Operation]) -> bool:
    """Returns whether any of the ops draws random numbers."""
    kinds = ("Random", "TruncatedNormal", "Multinomial")
    return any(kind in op.type for op in operations for kind in kinds)
