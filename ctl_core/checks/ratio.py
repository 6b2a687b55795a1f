"""Whether a loss that is one number is the sum over its batch: looked at before each training.

A mean would make gradients smaller by the size of the batch. Nothing tells the two apart but their
values: a batch's sum is that of its halves, its mean is half of that of theirs. The ratio decides,
since noise, smoothing and negatives out of the batch shift it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ctl_core.batches import count_rows
from ctl_core.checks.returned import split_objectives
from ctl_core.collectives import Alone
from ctl_core.compat import drawing_from, global_seed_generator, with_called
from ctl_core.console import Console
from ctl_core.forward import run_model
from ctl_core.input import first_replica, take_rows
from ctl_core.model.parts import Parts
from ctl_core.numerics.precision import to_float32
from ctl_core.numerics.staging import ReplicaCopies
from ctl_core.process_state import seeds_kept
from ctl_core.state import State
from ctl_core.training_mode import call

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
    of_vectors = bool(tried.pop("of vectors", None))
    ratios = {name: _find_ratio(values) for name, values in tried.items()}
    of_loss = ratios.pop("create_loss", None)
    for name, ratio in ratios.items():
        if ratio is None or not MEAN[0] <= ratio <= WHOLE:
            continue
        is_own = hooks.grad_pre.is_default or (of_loss and MEAN[0] <= of_loss <= WHOLE)
        hook = hooks.create_loss if is_own else hooks.grad_pre
        objective = name.removeprefix("grad_pre/")
        said = (
            f"the loss{f' of {objective!r}' * bool(objective)} of a batch is {ratio:.2f} times the "
            "sum of those of its halves, "
        )
        if ratio > MEAN[1]:
            console.warn(
                f"{hook}: {said}so it is of a batch as a whole: weights depend on the number of "
                "devices and micro-batches, unless these exchange what it is made of, by "
                "ctl_core.all_gather or all_reduce."
            )
            continue
        cure = "return one number per example, or their sum (tf.reduce_sum)"
        if of_vectors:
            cure = "give both values that it compares the shape [b, 1], with value[:, None]"
        raise hook.reject(
            f"{said}as a mean over the batch is; {cure}: the engine divides by the global batch "
            "size itself, or by what batch_weight says."
        )


def _find_ratio(values: list[tuple[float, float, float]]) -> float | None:
    """Returns the median of what a whole is to its halves; None where their signs differ."""
    signs = {(value > 0) - (value < 0) for of_batch in values for value in of_batch}
    if signs not in ({1}, {-1}):
        return None
    return statistics.median(whole / (one + other) for whole, one, other in values)


def _try_batches(state: State) -> dict[str, list[tuple[float, float, float]]]:
    """Returns by loss, for each batch, its value and those of its halves."""
    generator = global_seed_generator()

    @tf.function(autograph=False)
    def compute(batch: Any) -> dict[str, tf.Tensor]:
        with Alone(state.strategy, first_replica(state.strategy)), drawing_from(generator):
            return compute_scalars(state.parts, batch)

    parts_of_batches = []
    for batch in state.data.source.make().take(BATCHES):
        half = min(int(count_rows(batch)), MOST_ROWS) // 2
        slices = ((0, 2 * half), (0, half), (half, half))
        if half:
            parts_of_batches.append([_cut(batch, *one) for one in slices])
    found: dict[str, list[tuple[float, float, float]]] = {}
    with state.strategy.scope():
        graph = compute.get_concrete_function(parts_of_batches[0][0]).graph
        written = state.recording.find_written(graph, state.strategy)
        copies = ReplicaCopies(state.strategy, written)
        draws = DRAWS if draws_numbers(with_called(graph.get_operations())) else 1
        with copies.put_back_after():
            for three in parts_of_batches:
                sums: dict[str, list[float]] = {}
                for index, part in enumerate(three):
                    for _ in range(draws):
                        for name, value in compute(part).items():
                            sums.setdefault(name, [0.0] * 3)[index] += float(value)
                for name, (whole, first, second) in sums.items():
                    found.setdefault(name, []).append((whole, first, second))
    return found


def _cut(batch: Any, first: int, rows: int) -> Any:
    return tf.nest.map_structure(lambda part: take_rows(part, first, rows), batch)


def compute_scalars(parts: Parts, batch: Any) -> dict[str, tf.Tensor]:
    """Returns those losses of a batch that are one number, computed as for an evaluation.

    Returns:
        ``create_loss``, and ``grad_pre/NAME`` of each objective; ``of vectors`` where all that the
        loss is given has one dimension.
    """
    found: dict[str, Any] = {}
    hooks, parts = parts.hooks, dataclasses.replace(parts, quiet=True)
    for moment in parts.moments():
        values = {"batch": batch, **parts.values(moment)}
        output = run_model(parts, moment, batch, training=True)
        loss_input = hooks.loss_pre.in_graph(output=output, training=False, **values)
        loss = to_float32(call(parts.train_loss, loss_input, training=False))
        if tf.is_tensor(loss) and loss.shape.rank == 0:
            found["create_loss"] = loss
            inputs = tf.nest.flatten(loss_input)
            if len(inputs) == 2 and all(one.shape.rank == 1 for one in inputs):
                found["of vectors"] = loss
        returned = hooks.grad_pre.in_graph(loss=loss, output=output, **values)
        named = split_objectives(hooks.grad_pre, returned, parts.objective(moment))
        for name in parts.scalar_losses & named.keys():
            found[f"grad_pre/{name}"] = named[name][0]
    return found


def draws_numbers(operations: Iterable[Any]) -> bool:
    """Whether some of the ops of graphs draw random numbers."""
    kinds = ("Random", "TruncatedNormal", "Multinomial")
    return any(kind in op.type for op in operations for kind in kinds)
