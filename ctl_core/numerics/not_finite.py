"""Losses that are NaN or infinite, and NaN gradients: noted in the graph, told outside of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

NEVER = 2**62
# What a replica notes of an update: its loss, and whether a gradient has NaN where that is counted.
Note = tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Noted:
    """What is known of some steps; in the graph an int64 vector of the same four numbers.

    Attributes:
        first: the first step whose loss was not finite on some replica, or ``NEVER``
        latest: the last such step so far, or 0
        steps: how many such steps there were; in a cluster, on the process with most
        zeroed: in how many steps ``update_pre`` has turned NaN in a gradient into 0
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


def note_update(losses: Mapping[str, tf.Tensor], gradients: Iterable[Any] | None) -> Note:
    """Returns what one replica notes of an update.

    Args:
        losses: its objectives by name, floating-point scalars
        gradients: those whose NaN are counted; None: nobody counts
    """
    # A sum that is finite has finite parts.
    loss = tf.add_n([tf.cast(loss, tf.float32) for loss in losses.values()])
    if gradients is None:
        return (loss,)
    values = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
    some = [tf.reduce_any(tf.math.is_nan(value)) for value in values]
    return loss, tf.reduce_any(tf.stack(some or [False]))


def unite_notes(notes: Iterable[Note]) -> Note:
    """Returns the note of a step, of those of its turns and of all local replicas."""
    losses, *nans = zip(*notes, strict=True)
    return (tf.add_n(losses), *(tf.reduce_any(tf.stack(several)) for several in nans))


def create_arrays(steps: tf.Tensor) -> list[tf.TensorArray]:
    """Creates arrays for the notes of so many steps: one or two small ops a step fill them."""
    return [
        tf.TensorArray(kind, tf.cast(steps, tf.int32), element_shape=[])
        for kind in (tf.float32, tf.bool)
    ]


def write_note(arrays: list[Any], index: tf.Tensor, note: Note) -> list[Any]:
    """Returns the arrays with the note of a step in them."""
    index = tf.cast(index, tf.int32)
    written = [array.write(index, part) for array, part in zip(arrays, note, strict=False)]
    return written + arrays[len(written) :]


def summarize(losses: tf.Tensor, nans: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Returns the numbers of ``Noted`` for the steps after ``before``, of each step's note."""
    steps = before + 1 + tf.range(tf.size(losses, tf.int64), dtype=tf.int64)
    bad = tf.logical_not(tf.math.is_finite(losses))
    first = tf.reduce_min(tf.where(bad, steps, NEVER))
    latest = tf.reduce_max(tf.where(bad, steps, 0))
    counts = [tf.math.count_nonzero(part) for part in (bad, nans)]
    return tf.stack([tf.minimum(first, NEVER), tf.maximum(latest, 0), *counts])


# Step by step, of scalars alone: in an executable arrays do not grow, and small ops take its time.
def nothing() -> tf.Tensor:
    """Returns the numbers of no step."""
    return tf.constant(dataclasses.astuple(Noted()), tf.int64)


def of_step(notes: Iterable[Note], step: tf.Tensor) -> tf.Tensor:
    """Returns those of one step, of its notes, if there are any."""
    notes = list(notes)
    if not notes:
        return nothing()
    loss, nans = (*unite_notes(notes), tf.constant(False))[:2]
    bad = tf.logical_not(tf.math.is_finite(loss))
    counts = [tf.cast(part, tf.int64) for part in (bad, nans)]
    never = tf.constant(NEVER, tf.int64)
    return tf.stack([tf.where(bad, step, never), tf.where(bad, step, 0), *counts])


def then(before: tf.Tensor, later: tf.Tensor) -> tf.Tensor:
    """Adds those of later steps, as ``Noted.then`` does."""
    first, latest = tf.minimum(before[0], later[0]), tf.maximum(before[1], later[1])
    return tf.stack([first, latest, before[2] + later[2], before[3] + later[3]])
