"""What becomes NaN or infinite: losses and gradients, noted in the graph and told outside of it.

With float16 such updates are skipped, and the loss is scaled, so that they are few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.numerics.variables import create_scalar

NEVER = 2**62
# Of the loss scale: where it starts, its bounds (one that is infinite could not be halved), and
# after how many finite updates it doubles.
INITIAL, LEAST, MOST, PATIENCE = 2.0**15, 1.0, 2.0**64, 2000


def note_update(losses: Mapping[str, tf.Tensor], gradients: Iterable[Any]) -> tf.Tensor:
    """Returns what one replica notes of an update, in one number.

    It is NaN or infinity if one of the losses is, minus infinity if only a gradient has NaN, and
    otherwise finite; so is a sum of such numbers.
    """
    note = tf.abs(tf.add_n([tf.cast(loss, tf.float32) for loss in losses.values()]))
    values = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
    if values:
        some = tf.stack([tf.reduce_any(tf.math.is_nan(value)) for value in values])
        note += tf.math.log(tf.cast(~tf.reduce_any(some), tf.float32))
    return note


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """What is known of some steps.

    Attributes:
        first: the first step whose loss was not finite on some replica, or ``NEVER``
        latest: the last such step so far, or 0
        steps: how many such steps there were; in a cluster, on the process with most
        zeroed: in how many others ``update_pre`` has turned NaN in a gradient into 0
    """

    first: int = NEVER
    latest: int = 0
    steps: int = 0
    zeroed: int = 0

    @classmethod
    def from_notes(cls, notes: np.ndarray, last: int) -> NonFinite:
        """Returns what the notes of steps, a vector, say; ``last`` is the step of the last one."""
        if np.isfinite(notes).all():
            return cls()
        steps = np.arange(len(notes)) + last - len(notes) + 1
        bad = steps[np.isnan(notes) | np.isposinf(notes)].tolist()
        zeroed = int(np.isneginf(notes).sum())
        return cls(bad[0], bad[-1], len(bad), zeroed) if bad else cls(zeroed=zeroed)

    def merge_later(self, later: NonFinite) -> NonFinite:
        """Adds what is known of later steps."""
        return NonFinite(
            min(self.first, later.first),
            max(self.latest, later.latest),
            self.steps + later.steps,
            self.zeroed + later.zeroed,
        )


class LossScale:
    """What objectives are multiplied by, so that float16 gradients do not become 0.

    Its ``value`` doubles after 2000 finite updates in a row and is halved by one that is not
    finite, which is skipped: Micikevicius et al. 2018, Mixed Precision Training.
    """

    def __init__(self) -> None:
        self.value = create_scalar(INITIAL, tf.float32, "scale")
        self._finite = create_scalar(0, tf.int64, "finite")

    def adjust(self, finite: tf.Tensor) -> None:
        """Notes whether an update was finite; runs once an update, in a cross-replica context."""
        count, scale = self._finite + 1, tf.convert_to_tensor(self.value)
        grown = count >= PATIENCE
        doubled = tf.where(grown, tf.minimum(scale * 2.0, MOST), scale)
        self.value.assign(tf.where(finite, doubled, tf.maximum(scale / 2.0, LEAST)))
        self._finite.assign(tf.where(finite & ~grown, count, 0))

    def describe_trouble(self) -> str | None:
        """Says that nothing is learnt any more, if the scale cannot fall further."""
        if self.value.numpy() > LEAST:
            return None
        return (
            "updates are skipped: gradients were not finite in float16, however far the loss was "
            "scaled down; if the loss is finite with precision float32, take bfloat16."
        )


def are_finite(gradients: Any) -> tf.Tensor:
    """Returns whether every entry of all gradients is finite, a scalar bool."""
    tensors = tf.nest.flatten(gradients, expand_composites=True)
    floating = [tensor for tensor in tensors if tensor.dtype.is_floating]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in floating])
