"""Whether a loss that is one number is the sum over its batch: looked at before each training.

A mean would make gradients smaller by the size of the batch. Nothing tells the two apart but their
values: a batch's sum is that of its halves, its mean is half of that of theirs. The ratio decides,
since noise, smoothing and negatives out of the batch shift it; a constant that is added shifts it,
too, but the slopes still add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.cluster.collectives import Alone
from ctl_core.compat import drawing_from, global_seed_generator, with_called
from ctl_core.input.batches import count_rows, first_replica, take_rows
from ctl_core.model.forward import compute_loss, run_model
from ctl_core.model.parts import Parts
from ctl_core.model.returned import split_objectives
from ctl_core.model.state import State
from ctl_core.numerics.randomness import seeds_kept
from ctl_core.numerics.replicas import ReplicaCopies
from ctl_core.run.console import Console

BATCHES, MOST_ROWS = 3, 64
DRAWS = 20  # of a loss that has noise of its own
MEAN = 0.45, 0.55  # ratios of a mean, with noise and smoothing
WHOLE = 0.85  # up to here, a loss is no sum over the examples


def check_losses(state: State, console: Console) -> None:
    """Tries the losses of some batches beside those of their halves, without training.

    Costs nothing where each example has a loss, otherwise two small graphs and one more call of
    ``create_dataset``. What cannot be tried gives no verdict. Variables and random numbers are as
    before.

    Args:
        state: of the run
        console: for a notice

    Raises:
        SetupError: a loss is a mean.
    """
    hooks = state.hooks
    if not state.parts.scalar_losses or not hooks.count_examples.is_default:
        return
    try:
        with seeds_kept():
            tried = _try_batches(state)
    except Exception:  # the trial's own: half a batch may not do; training says what is wrong
        return
    hook = hooks.create_loss if hooks.grad_pre.is_default else hooks.grad_pre
    for objective, numbers in tried.items():
        losses, slopes = numbers[..., 0], numbers[..., 1]
        if not ((losses > 0).all() or (losses < 0).all()):
            continue
        ratio = np.median(losses[:, 0] / losses[:, 1:].sum(1))
        adds_up = np.allclose(slopes[:, 0], slopes[:, 1:].sum(1), rtol=0.01)
        if adds_up or not MEAN[0] <= ratio <= WHOLE:
            continue
        said = (
            f"the loss{f' of {objective!r}' * bool(objective)} of a batch is {ratio:.2f} times the "
            "sum of those of its halves, "
        )
        if ratio <= MEAN[1]:
            raise hook.reject(
                f"{said}as a mean over the batch is; return one number per example, as Keras' "
                "losses with reduction=None do of values of shape [b, 1], or their sum "
                "(tf.reduce_sum): the engine divides by the global batch size itself, or by what "
                "batch_weight says."
            )
        console.warn(
            f"{hook}: {said}so it is of a batch as a whole: weights depend on the number of "
            "devices and micro-batches, unless these exchange what it is made of, by "
            "ctl_core.all_gather or all_reduce."
        )


def _try_batches(state: State) -> dict[str, np.ndarray]:
    """Returns by objective the loss and its slope of each batch, and of each half of it.

    Their shape is [batches, 3, 2].
    """
    generator = global_seed_generator()

    @tf.function(autograph=False)
    def compute(batch: Any) -> dict[str, tf.Tensor]:
        with Alone(state.strategy, first_replica(state.strategy)), drawing_from(generator):
            return compute_scalars(state.parts, batch)

    parts_of_batches = []
    for batch in state.data.make()[0].take(BATCHES):
        half = min(int(count_rows(batch)), MOST_ROWS) // 2
        if half:
            slices = ((0, 2 * half), (0, half), (half, half))
            parts_of_batches.append([_take_rows(batch, *one) for one in slices])
    found: dict[str, list[list[np.ndarray]]] = {}
    with state.strategy.scope():
        graph = compute.get_concrete_function(parts_of_batches[0][0]).graph
        copies = ReplicaCopies(state.strategy, state.recording.find_written(graph, state.strategy))
        draws = DRAWS if draws_numbers(with_called(graph.get_operations())) else 1
        with copies.put_back_after():
            for three in parts_of_batches:
                drawn = [[compute(part) for _ in range(draws)] for part in three]
                for name in drawn[0][0]:
                    sums = [np.sum([one[name] for one in several], 0) for several in drawn]
                    found.setdefault(name, []).append(sums)
    return {name: np.array(sums) for name, sums in found.items()}


def _take_rows(batch: Any, first: int, rows: int) -> Any:
    return tf.nest.map_structure(lambda part: take_rows(part, first, rows), batch)


def compute_scalars(parts: Parts, batch: Any) -> dict[str, tf.Tensor]:
    """Returns by objective those losses of a batch that are one number, as for an evaluation.

    Beside each stands its slope, where all trained weights grow alike.
    """
    found: dict[str, tf.Tensor] = {}
    hooks, parts = parts.hooks, dataclasses.replace(parts, quiet=True)
    for moment in parts.moments():
        values = {"batch": batch, **parts.values(moment)}
        with tf.GradientTape(persistent=True) as tape:
            output = run_model(parts, moment, batch, training=True)
            loss = compute_loss(parts, moment, batch, output, training=True)
            returned = hooks.grad_pre.in_graph(loss=loss, output=output, **values)
        named = split_objectives(hooks.grad_pre, returned, parts.objective(moment))
        for name in parts.scalar_losses & named.keys():
            scalar, _, variables, *_ = named[name]
            slopes = [g for g in tape.gradient(scalar, variables) if g is not None]
            slope = sum(tf.reduce_sum(tf.cast(g, tf.float32)) for g in slopes)
            found[name] = tf.stack([tf.cast(scalar, tf.float32), slope])
    return found


def draws_numbers(operations: Iterable[Any]) -> bool:
    """Whether some of the ops of graphs draw random numbers."""
    kinds = ("Random", "TruncatedNormal", "Multinomial")
    return any(kind in op.type for op in operations for kind in kinds)
