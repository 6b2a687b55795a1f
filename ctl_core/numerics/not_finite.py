"""Detects NaN and infinite values in losses and gradients, and summarizes them over the steps.

In float16, an update with such gradients is skipped. The loss is scaled so that this is rare.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf

from ctl_core.numerics.reduction import is_float8
from ctl_core.numerics.report import Report
from ctl_core.numerics.variables import create_scalar
from ctl_core.types import Gradient

# The value of ``NonFinite.first`` as long as the loss of every step was finite.
NEVER = 2**62
# The initial value of the loss scale, and its bounds. The upper bound keeps the scale finite,
# because an infinite scale could not be halved.
INITIAL_SCALE = 2.0**15
MIN_SCALE = 1.0
MAX_SCALE = 2.0**64
# The number of consecutive finite updates after which the loss scale doubles.
PATIENCE = 2000


def are_losses_finite(losses: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns whether all losses of a replica are finite, as a bool scalar.

    Args:
        losses: scalars by objective
    """
    total = tf.add_n([tf.cast(loss, tf.float32) for loss in losses.values()])
    return tf.math.is_finite(total)


def are_numbers(gradients: Iterable[Gradient]) -> tf.Tensor:
    """Returns whether no gradient, dense or sparse, contains NaN, as a bool scalar.

    A norm is NaN if and only if an entry is NaN. If ``update_pre`` clips by the global norm, this
    function costs nothing, because TensorFlow computes equal ops of a graph only once.
    """
    norms = [tf.cast(norm, tf.float32) for norm in _compute_norms(gradients)]
    if not norms:
        return tf.constant(True)
    return ~tf.math.is_nan(tf.add_n(norms))


def compute_global_norm(gradients: Iterable[Gradient]) -> tf.Tensor:
    """Returns the norm of all entries of gradients, which may be dense, sparse or complex.

    Args:
        gradients: the gradients, of any floating-point or complex dtypes

    Returns:
        A scalar. If all gradients have the same dtype, it has this dtype, or that of the parts of
        a complex number; otherwise float64.
    """
    gradients = list(gradients)
    norms = _compute_norms(gradients)
    if len(norms) == 1:
        return norms[0]
    if len(norms) > 1:  # norms in bfloat16 would be too imprecise
        norms = _compute_norms(map(_cast_bfloat16, gradients))
    return tf.linalg.global_norm([tf.cast(norm, tf.float64) for norm in norms])


def _cast_bfloat16(gradient: Gradient) -> Gradient:
    if gradient.dtype != tf.bfloat16:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    return tf.cast(gradient, tf.float32)


def _compute_norms(gradients: Iterable[Gradient]) -> list[tf.Tensor]:
    """Returns a norm for each floating-point dtype of the gradients; others are ignored.

    The real and the imaginary part of a complex gradient count as two gradients.
    """
    by_dtype: dict[tf.DType, list[Gradient]] = {}
    for gradient in gradients:
        for component in _split_complex(gradient):
            if component.dtype.is_floating:
                by_dtype.setdefault(component.dtype, []).append(component)
    return [tf.linalg.global_norm(group) for group in by_dtype.values()]


def _split_complex(gradient: Gradient) -> list[Gradient]:
    """Returns the real and the imaginary part of a complex gradient, or a real gradient itself."""
    if not gradient.dtype.is_complex:
        return [gradient]
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    return [tf.math.real(gradient), tf.math.imag(gradient)]


def find_finite_entries(tensor: tf.Tensor) -> tf.Tensor:
    """Returns for each entry of a real or complex tensor whether it is finite."""
    if is_float8(tensor.dtype):  # is_finite does not support float8
        tensor = tf.cast(tensor, tf.float32)
    first, *others = _split_complex(tensor)
    are_finite = tf.math.is_finite(first)
    for component in others:
        are_finite &= tf.math.is_finite(component)
    return are_finite


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """A summary of the steps whose losses or gradients were not finite.

    Attributes:
        first: the first step whose loss was not finite on some replica, or ``NEVER``
        latest: the latest step whose loss was not finite, or 0
        steps: the number of steps whose loss was not finite; in a cluster, the largest number of
            all processes
        zeroed: the value of ``nan_gradients``, under the name that it has in records
    """

    first: int = NEVER
    latest: int = 0
    steps: int = 0
    zeroed: int = 0

    @classmethod
    def from_report(cls, report: Report, last: int) -> NonFinite:
        """Summarizes the reports of consecutive steps.

        Args:
            report: the reports of the steps, see ``Report.unpack``
            last: the number of the last of these steps
        """
        loss_is_finite, gradients_are_numbers, _ = report
        if loss_is_finite.all() and gradients_are_numbers.all():
            return cls()
        nan_gradients = int((loss_is_finite & ~gradients_are_numbers).sum())
        steps = np.arange(len(loss_is_finite)) + last - len(loss_is_finite) + 1
        diverged = steps[~loss_is_finite].tolist()
        if not diverged:
            return cls(zeroed=nan_gradients)
        return cls(diverged[0], diverged[-1], len(diverged), nan_gradients)

    @property
    def nan_gradients(self) -> int:
        """The number of steps with a finite loss in which ``update_pre`` received NaN gradients."""
        return self.zeroed

    def merge_later(self, later: NonFinite) -> NonFinite:
        """Returns this summary combined with the summary of later steps."""
        return NonFinite(
            min(self.first, later.first),
            max(self.latest, later.latest),
            self.steps + later.steps,
            self.nan_gradients + later.nan_gradients,
        )


class LossScale:
    """The factor that multiplies objectives, so that float16 gradients do not become 0.

    The factor doubles after ``PATIENCE`` consecutive finite updates. An update that is not finite
    is skipped, and the factor is halved. See Micikevicius et al. 2018, Mixed Precision Training.

    Attributes:
        value: the factor, a float32 scalar variable
    """

    def __init__(self) -> None:
        self.value = create_scalar(INITIAL_SCALE, tf.float32, "scale")
        self._finite = create_scalar(0, tf.int64, "finite")

    def adjust(self, is_finite: tf.Tensor) -> None:
        """Adjusts the factor after an update; runs in a cross-replica context.

        Args:
            is_finite: whether the gradients of the update were finite, a bool scalar
        """
        scale = tf.convert_to_tensor(self.value)
        finite_updates = self._finite + 1
        grows = finite_updates >= PATIENCE
        grown = tf.where(grows, tf.minimum(scale * 2.0, MAX_SCALE), scale)
        halved = tf.maximum(scale / 2.0, MIN_SCALE)
        self.value.assign(tf.where(is_finite, grown, halved))
        self._finite.assign(tf.where(is_finite & ~grows, finite_updates, 0))

    def describe_trouble(self) -> str | None:
        """Returns a warning if the factor has reached its minimum; None otherwise.

        At the minimum, the loss cannot be scaled down further, so updates that are not finite are
        skipped.
        """
        if self.value.numpy() > MIN_SCALE:
            return None
        return (
            "updates are skipped, because gradients were not finite in float16 even with the "
            "smallest loss scale; if the loss is finite with --precision float32, use "
            "bfloat16."
        )


def are_finite(gradients: Iterable[Gradient]) -> tf.Tensor:
    """Returns whether every entry of all gradients is finite, as a bool scalar."""
    tensors = tf.nest.flatten(gradients, expand_composites=True)
    components = itertools.chain(*map(_split_complex, tensors))
    floating = [component for component in components if component.dtype.is_floating]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in floating])
