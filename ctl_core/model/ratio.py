"""Whether a loss that is one number, and a weight, are sums over a batch: before each training.

A mean would make gradients smaller by the size of the batch. Nothing tells the two apart but their
values: the gradient of a sum over a batch is that of the sums over its halves, that of a mean is
half of it. The ratio decides, not equality: noise, smoothing and negatives out of the batch shift
it.
"""

import collections
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.cluster.replica_contexts import LoneReplica
from ctl_core.compat import add_called_ops, get_seed_generator, run_replica
from ctl_core.input.batches import count_rows, find_first_replica, take_rows
from ctl_core.model.components import StepContext, TraceContext
from ctl_core.model.copies import ReplicaCopies
from ctl_core.model.forward import compute_objectives, run_model, weigh_batch
from ctl_core.model.state import State
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.run.console import Console

BATCHES, MOST_ROWS, WEIGHED = 3, 64, 8
_WEIGHT = "batch_weight"  # among objectives
DRAWS = 20  # of a loss that has noise of its own
MEAN = 0.45, 0.55  # ratios of a mean, with noise and smoothing
WHOLE = 0.85  # up to here, a loss is no sum over the examples


def check_losses(state: State, console: Console) -> None:
    """Tries the losses of some batches beside those of their halves, weights beside those of rows.

    Costs nothing where each example has a loss, and no hook weighs; otherwise small graphs and one
    more call of ``create_dataset``. What cannot be tried gives no verdict. Nothing is changed. A
    mean, or a weight that is no sum, is a SetupError.
    """
    hooks = state.hooks
    needs_trial = bool(state.components.scalar_losses) or hooks.batch_weight is not None
    if not needs_trial or not state.components.shape.by_rows:
        return
    try:
        with keep_seeds():
            ratios = _try_batches(state)
    except Exception:  # the trial's own: half a batch may not do; training says what is wrong
        return
    for ratio in ratios.pop(_WEIGHT, []):
        if hooks.batch_weight and (ratio < WHOLE or ratio * WHOLE > 1):
            raise hooks.batch_weight.reject(
                f"some examples together weigh {ratio:.2f} times what they do one by one; return a "
                "sum, which may be 0, and no mean or maximum."
            )
    for objective, several in ratios.items():
        hook = hooks.grad_pre
        if objective in state.components.unchanged_losses:
            hook = hooks.create_loss
        ratio = np.median(several)
        loss = f"the loss{f' of {objective!r}' * bool(objective)}"
        found = f"a batch's gradient is {ratio:.2f} times that of its halves"
        if MEAN[0] <= ratio <= MEAN[1]:
            raise hook.reject(
                f"{loss} is a mean: {found}; return one number per example (Keras: "
                "reduction=None, of [b, 1])."
            )
        if MEAN[0] <= ratio <= WHOLE:
            console.warn(
                f"{hook}: {loss} is of a batch as a whole: {found}. It depends on devices, unless "
                "these exchange what it is made of, by ctl_core.all_gather or all_reduce."
            )


def _try_batches(state: State) -> dict[str, list[float]]:
    """Returns by objective the ratio of each batch, NaN where there is no gradient."""
    generator = get_seed_generator()
    context = TraceContext(state.components, quiet=True)
    strategy = state.strategy

    @tf.function(autograph=False)
    def try_batch(batch: Any, half: int) -> dict[str, list[tf.Tensor]]:
        with LoneReplica(strategy, find_first_replica(strategy)), run_replica(generator):
            return measure(context, batch, half)

    batches = [batch for batch in state.data.make_pass().take(BATCHES) if count_rows(batch) > 1]
    tried = [(batch, min(int(count_rows(batch)), MOST_ROWS) // 2) for batch in batches]
    found: dict[str, list[float]] = {}
    with strategy.scope():
        graph = try_batch.get_concrete_function(*tried[0]).graph
        copies = ReplicaCopies(strategy, state.recording.find_written(graph, strategy))
        draws = DRAWS if has_random_ops(add_called_ops(graph.get_operations())) else 1
        with copies.put_back_after():
            for batch, half in tried:
                drawn = [try_batch(batch, half) for _ in range(draws)]
                for name in drawn[0]:
                    whole, halves = np.sum([one[name] for one in drawn], axis=0)
                    found.setdefault(name, []).append(
                        float(np.sqrt(whole / halves)) if halves else np.nan
                    )
    return found


def measure(context: StepContext, batch: Any, half: int) -> dict[str, list[Any]]:
    """Measures, squared, the gradient's norm by objective, and a weight: of rows, and of parts."""

    def take(first: int, rows: int) -> Any:
        return tf.nest.map_structure(lambda part: take_rows(part, first, rows), batch)

    def weigh(turn: StepContext, first: int, rows: int) -> tf.Tensor:
        part = take(first, rows)
        output = run_model(turn, part, training=True) if needs_output else None
        return tf.cast(weigh_batch(turn, part, output, None), tf.float64)

    needs_output = "output" in getattr(context.hooks.batch_weight, "arguments", ())
    found: dict[str, list[Any]] = collections.defaultdict(lambda: [0.0, 0.0])
    compared = [take(0, 2 * half)], [take(0, half), take(half, half)]
    scalar_losses = context.components.scalar_losses
    for turn in context.list_turns():
        for i, batches in enumerate(compared if scalar_losses else ()):
            with tf.GradientTape(persistent=True) as tape:
                tried = [compute_objectives(turn, one, 1, 0).objectives for one in batches]
                totals = {
                    name: tf.add_n([objectives[name].value for objectives in tried])
                    for name in scalar_losses & tried[0].keys()
                }
            for name, total in totals.items():
                gradients = tape.gradient(total, tried[0][name].variables)
                found[name][i] += tf.cast(tf.linalg.global_norm(gradients), tf.float64) ** 2
        if context.hooks.batch_weight is not None:
            rows = min(2 * half, WEIGHED)
            found[_WEIGHT][0] += weigh(turn, 0, rows) ** 2
            found[_WEIGHT][1] += tf.add_n([weigh(turn, n, 1) for n in range(rows)]) ** 2
    return dict(found)


def has_random_ops(operations: Iterable[Any]) -> bool:
    """Whether some of the ops of graphs draw random numbers."""
    kinds = ("Random", "TruncatedNormal", "Multinomial")
    return any(kind in op.type for op in operations for kind in kinds)
