"""Micro-batches: what several of them contribute, added up on each replica's own device.

Everything here runs in a cross-replica context, while a graph is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ctl_core.cluster.strategy import distribute
from ctl_core.numerics.joining import joined

ONCE_IN_MICRO_BATCH = (
    "grad_pre: applies an optimizer by itself, which with accumulate_steps would be once for each "
    "micro-batch; make it an objective of its own (create_opt and grad_pre return dicts with the "
    "same names), or leave out accumulate_steps."
)
_KEPT = ("output", "batch")
_UNLIKE = (
    "the {name} of micro-batches differs in shape and cannot be joined; pad to one shape in "
    "create_dataset, or name {name} in a host hook, which gets it as a ragged tensor."
)


def accumulate(
    strategy: tf.distribute.Strategy,
    steps: int,
    contribute: Callable[[Any], Any],
    joined_for: Mapping[str, str],
) -> tuple[Any, dict[str, list[Any]]]:
    """Adds up the contributions of A micro-batches, on each replica's own device.

    A micro-batch starts when the gradients of the one before it are there, so that only one takes
    memory at a time; written out one behind the other, TensorFlow would run them side by side.

    Args:
        strategy: of the replicas
        steps: A
        contribute: draws the micro-batch of an index for each replica, and returns what
            ``forward_backward`` makes of it
        joined_for: which of ``output`` and ``batch`` are to be in the sum as well, joined, and for
            whom, for a message

    Returns:
        A contribution with a value per replica: losses, weights and dense gradients added up; the
        rows of sparse gradients one behind the other, and outputs and batches that are to be
        joined. And outputs and batches by name, as a list of such values by micro-batch.
    """

    def contributions(index: Any) -> tuple[Any, ...]:
        return strategy.experimental_local_results(contribute(index))  # type: ignore[no-any-return]

    def on_each(function: Callable[..., Any], *values: Sequence[Any]) -> list[Any]:
        results = []
        for device, *own in zip(strategy.extended.worker_devices, *values, strict=True):
            with tf.device(device):
                results.append(function(*own))
        return results

    def body(done: tf.Tensor, totals: list[Any]) -> tuple[tf.Tensor, list[Any]]:
        found = contributions(done)
        return done + 1, on_each(lambda total, one: _add(total, one, done), totals, found)

    first = contributions(0)
    totals = on_each(lambda one: _start(one, steps), first)
    gradients = tf.nest.flatten([one["gradients"] for one in first], expand_composites=True)
    with tf.control_dependencies(gradients):
        _, totals = tf.while_loop(
            lambda done, _: done < steps, body, (tf.constant(1), totals), parallel_iterations=1
        )
    ended = on_each(lambda total, one: _end(total, one, steps), totals, first)
    pieces = {}
    for name in {*_KEPT} & {*ended[0]}:
        by_step = zip(*(one[name] for one in ended), strict=True)
        pieces[name] = [distribute(strategy, list(values)) for values in by_step]
        for one in ended:
            values = one.pop(name)
            if name in joined_for:
                where = f"{joined_for[name]}: {_UNLIKE.format(name=name)}"
                one[name] = tf.nest.map_structure(lambda *v, w=where: joined(v, w), *values)
    return distribute(strategy, ended), pieces


# A total is a list with an entry for each part of a contribution: a tensor where micro-batches are
# added up, otherwise a list with an array of A entries for each tensor that the part is made of.
def _start(one: dict[str, Any], steps: int) -> list[Any]:
    """Returns a total that holds the first contribution."""

    def start(part: Any, summed: bool) -> Any:
        if summed and not isinstance(part, tf.IndexedSlices):
            return part
        return [
            tf.TensorArray(x.dtype, steps, infer_shape=False).write(0, x) for x in _tensors(part)
        ]

    return [
        start(part, summed=name in ("loss", "gradients", "weight"))
        for name in sorted(one)  # the order of tf.nest
        for part in tf.nest.flatten(one[name])
    ]


def _add(total: list[Any], one: dict[str, Any], index: tf.Tensor) -> list[Any]:
    """Returns the total with another contribution in it, the one of this index."""

    def add(before: Any, part: Any) -> Any:
        if not isinstance(before, list):
            return tf.ensure_shape(before + part, before.shape)
        return [array.write(index, x) for array, x in zip(before, _tensors(part), strict=True)]

    return [add(*pair) for pair in zip(total, tf.nest.flatten(one), strict=True)]


def _end(total: list[Any], one: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns the total in the form of a contribution; outputs and batches as lists."""

    def end(sum_or_arrays: Any, part: Any) -> Any:
        if not isinstance(sum_or_arrays, list):
            return tf.identity(sum_or_arrays)  # the loop's result names no device to reduce to
        shapes = [tensor.shape for tensor in _tensors(part)]
        pieces = []
        for index in range(steps):
            tensors = [
                tf.ensure_shape(array.read(index), shape)
                for array, shape in zip(sum_or_arrays, shapes, strict=True)
            ]
            pieces.append(tf.nest.pack_sequence_as(part, tensors, expand_composites=True))
        return pieces

    ended, rest = {}, iter(total)
    for name in sorted(one):  # the order of tf.nest
        parts = tf.nest.flatten(one[name])
        values = [end(next(rest), part) for part in parts]
        pack = functools.partial(tf.nest.pack_sequence_as, one[name])
        if name in _KEPT:
            ended[name] = [pack(several) for several in zip(*values, strict=True)]
        else:
            ended[name] = pack([joined(v) if isinstance(v, list) else v for v in values])
    return ended


def _tensors(part: Any) -> list[tf.Tensor]:
    """Returns the tensors that a part is made of: several, if it is ragged or sparse."""
    return tf.nest.flatten(part, expand_composites=True)  # type: ignore[no-any-return]
