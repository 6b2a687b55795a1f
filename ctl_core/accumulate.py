"""One update over all replicas: its micro-batches one after the other, then the update itself.

Everything here runs in a cross-replica context, while a graph is traced; what happens on a
replica is step.py's part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ctl_core.compat import summaries_of_first_replica
from ctl_core.inputs import Input, deal
from ctl_core.numerics.joining import joined
from ctl_core.numerics.not_finite import found_nans, seen
from ctl_core.step import Parts, apply, contribution, update


def take_update(
    parts: Parts,
    data: Input,
    wanted: frozenset[str],
    watch: bool = False,
    step: tf.Tensor | None = None,
) -> dict[str, Any]:
    """Draws the elements of one update, and takes it.

    Args:
        parts: what the step is made of
        data: where A elements for each local replica are drawn from
        wanted: names of the values to return, out of ``hooks.OBSERVED``
        watch: whether to measure how long it waits for its elements
        step: the number of the step that this update makes, an int64 scalar, for summaries; where
            nobody runs it, none

    Returns:
        The wanted values by name, each with a value per replica, as ``strategy.run`` returns them;
        ``output`` and ``batch`` as a list of such values, one for each micro-batch. And ``noted``,
        if losses are looked at: what ``not_finite.seen`` returns.
    """

    def run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return _run(data.strategy, function, args, step)

    kept = frozenset({"output", "batch"} & {*wanted, *parts.hooks.update_pre.arguments})

    def whole(batch: Any) -> dict[str, Any]:
        return updated(contribution(parts, batch, kept))

    def updated(contributed: dict[str, Any]) -> dict[str, Any]:
        with found_nans() as nans:
            found = update(parts, contributed, wanted)
        if parts.notes_losses:  # with a loss scale, an update of NaN gradients is skipped
            found["noted"] = seen(contributed["loss"], [] if parts.loss_scale else nans)
        return found

    if parts.accumulate_steps == 1:
        found = run(whole, (data.draw(watch),))
        found = {n: [value] if n in kept else value for n, value in found.items()}
    else:
        contributed, pieces = _accumulate(parts, data, kept, watch, step)
        found = run(updated, (contributed,))
        found |= {name: values for name, values in pieces.items() if name in wanted}
    if parts.loss_scale is not None:
        updates, finite = found.pop("updates"), found.pop("finite")
        finite = data.strategy.experimental_local_results(finite)[0]
        tf.cond(finite, lambda: run(lambda one: apply(parts, one), (updates,)), lambda: None)
        parts.loss_scale.adjust(finite)
    return found  # type: ignore[no-any-return]


def _run(
    strategy: tf.distribute.Strategy, function: Callable[..., Any], args: tuple[Any, ...], step: Any
) -> Any:
    """Calls a function on each replica; ``step`` is that of its summaries, or None."""

    def on_replica(*args: Any) -> Any:
        with summaries_of_first_replica(step):
            return function(*args)

    with tf.name_scope(""):  # a summary's name begins with it, and a loop's would be part of that
        return strategy.run(on_replica, args)


def _accumulate(
    parts: Parts, data: Input, kept: frozenset[str], watch: bool, step: Any
) -> tuple[Any, dict[str, list[Any]]]:
    """Adds up the contributions of A micro-batches, on each replica's own device.

    A micro-batch starts when the gradients of the one before it are there, so that only one takes
    memory at a time; written out one behind the other, TensorFlow would run them side by side.

    Returns:
        A contribution with a value per replica: losses, weights and dense gradients added up; the
        rows of sparse gradients, and what ``update_pre`` names of outputs and batches, one behind
        the other. And outputs and batches by name, as a list of such values by micro-batch.
    """
    strategy, steps = data.strategy, parts.accumulate_steps

    def contributions() -> tuple[Any, ...]:
        elements = data.draw(watch)
        values = _run(strategy, lambda batch: contribution(parts, batch, kept), (elements,), step)
        return strategy.experimental_local_results(values)  # type: ignore[no-any-return]

    def on_each(function: Callable[..., Any], *values: Sequence[Any]) -> list[Any]:
        results = []
        for device, *own in zip(strategy.extended.worker_devices, *values, strict=True):
            with tf.device(device):
                results.append(function(*own))
        return results

    def body(done: tf.Tensor, totals: list[Any]) -> tuple[tf.Tensor, list[Any]]:
        return done + 1, on_each(lambda total, one: _add(total, one, done), totals, contributions())

    first = contributions()
    totals = on_each(lambda one: _start(one, steps), first)
    gradients = tf.nest.flatten([one["gradients"] for one in first], expand_composites=True)
    with tf.control_dependencies(gradients):
        _, totals = tf.while_loop(
            lambda done, _: done < steps, body, (tf.constant(1), totals), parallel_iterations=1
        )
    ended = on_each(lambda total, one: _end(total, one, steps), totals, first)
    pieces = {
        name: [deal(strategy, list(p)) for p in zip(*(one[name] for one in ended), strict=True)]
        for name in kept
    }
    hook = parts.hooks.update_pre
    for name in kept:
        where = f"{hook.name} ({hook.where}): {_UNLIKE.format(name=name)}"
        for one in ended:
            values = one.pop(name)
            if name in hook.arguments:
                one[name] = tf.nest.map_structure(lambda *v, w=where: joined(v, w), *values)
    return deal(strategy, ended), pieces


_UNLIKE = (
    "the {name} of micro-batches differs in shape and cannot be joined; pad to one shape in "
    "create_dataset, or name {name} in a host hook, which gets it as a ragged tensor."
)


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
        if name in ("output", "batch"):
            ended[name] = [pack(several) for several in zip(*values, strict=True)]
        else:
            ended[name] = pack([joined(v) if isinstance(v, list) else v for v in values])
    return ended


def _tensors(part: Any) -> list[tf.Tensor]:
    """Returns the tensors that a part is made of: several, if it is ragged or sparse."""
    return tf.nest.flatten(part, expand_composites=True)  # type: ignore[no-any-return]
