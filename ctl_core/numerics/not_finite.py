"""What becomes NaN or infinite: losses and gradients, noted in the graph and told outside of it.

With float16 such updates are skipped, and the loss is scaled, so that they are few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl_core.numerics.variables import create_scalar
from ctl_core.types import Gradient

NEVER = 2**62
# Of the loss scale: where it starts, its bounds (one that is infinite could not be halved), and
# after how many finite updates it doubles.
INITIAL, LEAST, MOST, PATIENCE = 2.0**15, 1.0, 2.0**64, 2000


class FiniteFlags(NamedTuple):
    """What the graph notes of an update, or of a step: two bool scalars.

    Attributes:
        loss_is_finite: whether every loss is finite
        no_nan_removed: False if ``update_pre`` received NaN in a gradient and returned none
    """

    loss_is_finite: tf.Tensor
    no_nan_removed: tf.Tensor


def combine_flags(flags: Sequence[FiniteFlags]) -> tf.Tensor:
    """Combines the flags of all replicas and updates of a step.

    Returns:
        A bool tensor of shape [2]: the fields of ``FiniteFlags``, each True if it is True in all.
    """
    stacked = [tf.stack(update_flags) for update_flags in flags]
    return stacked[0] if len(stacked) == 1 else tf.reduce_all(stacked, axis=0)


def are_losses_finite(losses: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns whether all losses of a replica, scalars by objective, are finite: a bool scalar."""
    total = tf.add_n([tf.cast(loss, tf.float32) for loss in losses.values()])
    return tf.math.is_finite(total)


def are_numbers(gradients: Iterable[Gradient | None]) -> tf.Tensor:
    """Returns whether no gradient, dense or sparse, has an entry that is NaN: a bool scalar.

    None, which optimizers leave out, has no entries. Complex gradients are not searched.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    tensors = [tf.convert_to_tensor(_read_values(gradient)) for gradient in present]
    has_nan = [
        tf.reduce_any(tf.math.is_nan(tensor)) for tensor in tensors if tensor.dtype.is_floating
    ]
    return ~tf.reduce_any(tf.stack(has_nan)) if has_nan else tf.constant(True)


def _read_values(gradient: Gradient) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """What is known of some steps.

    Attributes:
        first: the first step whose loss was not finite on some replica, or ``NEVER``
        latest: the last such step so far, or 0
        steps: how many such steps there were; in a cluster, on the process with most
        zeroed: the number of other steps in which ``update_pre`` removed NaN from gradients
    """

    first: int = NEVER
    latest: int = 0
    steps: int = 0
    zeroed: int = 0

    @classmethod
    def from_flags(cls, flags: np.ndarray, last: int) -> NonFinite:
        """Summarizes the flags of consecutive steps.

        Args:
            flags: bool[steps, 2], see ``combine_flags``
            last: the number of the last of these steps
        """
        if flags.all():
            return cls()
        loss_is_finite, no_nan_removed = flags.T
        zeroed = int((loss_is_finite & ~no_nan_removed).sum())
        steps = np.arange(len(flags)) + last - len(flags) + 1
        diverged = steps[~loss_is_finite].tolist()
        if not diverged:
            return cls(zeroed=zeroed)
        return cls(diverged[0], diverged[-1], len(diverged), zeroed)

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
