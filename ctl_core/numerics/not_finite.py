"""Losses that are NaN or infinite, and NaN gradients: noted in the graph, told outside of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

NEVER = 2**62


@dataclasses.dataclass(frozen=True)
class Noted:
    """What is known of some steps.

    Attributes:
        first: the first step whose loss was not finite on some replica, or ``NEVER``
        latest: the last such step so far, or 0
        steps: how many such steps there were; in a cluster, on the process with most
        zeroed: in how many steps ``nan_to_zero`` has found NaN in a gradient
    """

    first: int = NEVER
    latest: int = 0
    steps: int = 0
    zeroed: int = 0

    def then(self, later: Noted) -> Noted:
        """Adds what a later graph call has found."""
        return Noted(
            min(self.first, later.first),
            max(self.latest, later.latest),
            self.steps + later.steps,
            self.zeroed + later.zeroed,
        )


class Notes:
    """What the steps of one graph call find, kept within the graph: one or two small ops a step.

    Works in a cross-replica context, while the graph is traced.
    """

    def __init__(self, steps: Any) -> None:
        """For so many steps, a scalar int."""
        self.arrays = tuple(
            tf.TensorArray(kind, tf.cast(steps, tf.int32), element_shape=[])
            for kind in (tf.float32, tf.bool)
        )

    def write(self, arrays: Any, index: Any, by_replica: list[list[dict[str, tf.Tensor]]]) -> Any:
        """Returns the arrays with what ``seen`` returned on each local replica, by turn."""
        losses, nans = arrays
        loss, any_nans = _together(list(itertools.chain(*by_replica)))
        index = tf.cast(index, tf.int32)
        losses = losses.write(index, loss)
        return losses, nans if any_nans is None else nans.write(index, any_nans)

    @staticmethod
    def summary(arrays: Any, before: Any) -> tf.Tensor:
        """Returns the numbers of ``Noted``, an int64 vector, of the steps after ``before``."""
        losses, nans = (array.stack() for array in arrays)
        steps = before + 1 + tf.range(tf.size(losses, tf.int64), dtype=tf.int64)
        bad = tf.logical_not(tf.math.is_finite(losses))
        first = tf.reduce_min(tf.where(bad, steps, NEVER))
        latest = tf.reduce_max(tf.where(bad, steps, 0))
        counts = [tf.math.count_nonzero(part) for part in (bad, nans)]
        return tf.stack([tf.minimum(first, NEVER), tf.maximum(latest, 0), *counts])


def seen(losses: Mapping[str, tf.Tensor], nans: list[tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns what one replica has to tell of a step.

    Args:
        losses: its objectives by name, floating-point scalars
        nans: what ``found_nans`` has collected
    """
    # A sum that is finite has finite parts.
    found = {"loss": tf.add_n([tf.cast(loss, tf.float32) for loss in losses.values()])}
    if nans:
        found["nans"] = tf.reduce_any(tf.stack(nans))
    return found


def _together(found: list[dict[str, tf.Tensor]]) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns the sum of the losses, and whether there were NaN gradients, if that is known."""
    some = [one["nans"] for one in found if "nans" in one]
    return tf.add_n([one["loss"] for one in found]), tf.reduce_any(some) if some else None


# The numbers of ``Noted`` as an int64 vector, step by step: in an executable arrays do not grow.
def nothing() -> tf.Tensor:
    """Returns those of no step."""
    return tf.constant(dataclasses.astuple(Noted()), tf.int64)


def of_step(found: list[dict[str, tf.Tensor]], step: tf.Tensor) -> tf.Tensor:
    """Returns those of one step, of what ``seen`` returned in its turns."""
    if not found:
        return nothing()
    loss, nans = _together(found)
    bad = tf.logical_not(tf.math.is_finite(loss))
    counts = [tf.cast(part, tf.int64) for part in (bad, False if nans is None else nans)]
    never = tf.constant(NEVER, tf.int64)
    return tf.stack([tf.where(bad, step, never), tf.where(bad, step, 0), *counts])


def then(before: tf.Tensor, later: tf.Tensor) -> tf.Tensor:
    """Adds those of later steps, as ``Noted.then`` does."""
    first, latest = tf.minimum(before[0], later[0]), tf.maximum(before[1], later[1])
    return tf.stack([first, latest, before[2] + later[2], before[3] + later[3]])


_tracing = threading.local()


@contextlib.contextmanager
def found_nans() -> Iterator[list[tf.Tensor]]:
    """Collects whether gradients that ``nan_to_zero`` is called with have NaN, bool scalars.

    Within, in this thread, a step is traced; what is called in another graph, such as a branch of
    a tf.cond, is left out.
    """
    found: list[tf.Tensor] = []
    _tracing.into = found, tf.compat.v1.get_default_graph()
    try:
        yield found
    finally:
        _tracing.into = None


@tf.autograph.experimental.do_not_convert
def note_nans(is_nan: Any) -> None:
    """Tells ``found_nans``, if a step is being traced, which entries of a gradient are NaN."""
    into = getattr(_tracing, "into", None)
    if into is not None and tf.compat.v1.get_default_graph() is into[1]:
        into[0].append(tf.reduce_any(is_nan))
