"""Mixed precision: the Keras policy of a run, and the loss scale that float16 needs.

Variables, losses, gradients and updates are float32 in every precision; layers compute in the
lower one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

_LOWER = (tf.float16, tf.bfloat16)
# Of the loss scale: where it starts, its bounds (one that is infinite could not be halved), and
# after how many finite updates it doubles.
INITIAL, LEAST, MOST, PATIENCE = 2.0**15, 1.0, 2.0**64, 2000
# With so many updates skipped in a row the scale has long been at its least: it is not the cause.
TOO_MANY = 20


@contextmanager
def policy(precision: str) -> Iterator[None]:
    """Lets layers made or called within compute in a precision; float32 changes nothing.

    Keras has one policy for the whole process: it is put back at the end, also where a hook has
    set another.
    """
    before = keras.config.dtype_policy()
    if precision != "float32":
        keras.config.set_dtype_policy(f"mixed_{precision}")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def lower_dtypes(layers: Iterable[keras.Layer]) -> set[str]:
    """Returns in which of float16 and bfloat16 some of the layers compute."""
    return {layer.compute_dtype for layer in layers} & {dtype.name for dtype in _LOWER}


def to_float32(structure: Any) -> Any:
    """Casts the float16 and bfloat16 tensors of a structure, ragged ones too, to float32."""

    def is_lower(part: Any) -> bool:
        return tf.is_tensor(part) and part.dtype in _LOWER

    if not any(map(is_lower, tf.nest.flatten(structure))):
        return structure
    return tf.nest.map_structure(
        lambda part: tf.cast(part, tf.float32) if is_lower(part) else part, structure
    )


class LossScale:
    """What objectives are multiplied by, so that float16 gradients do not become 0.

    It doubles after 2000 finite updates in a row and is halved by one that is not finite, which is
    skipped: Micikevicius et al. 2018, Mixed Precision Training.
    """

    def __init__(self) -> None:
        """Makes the scale, and counts of updates in a row that were finite, and that were not."""
        self._scale = _create_variable(INITIAL, tf.float32, "scale")
        self._finite = _create_variable(0, tf.int64, "finite")
        self._skipped = _create_variable(0, tf.int64, "skipped")

    def multiply(self, objective: tf.Tensor) -> tf.Tensor:
        """Returns the scaled objective."""
        return objective * tf.cast(self._scale, objective.dtype)

    def divide(self, gradients: Any) -> Any:
        """Returns gradients of scaled objectives as those of the objectives; sparse ones too."""
        return tf.nest.map_structure(
            lambda one: tf.math.scalar_mul(tf.cast(1.0 / self._scale, one.dtype), one), gradients
        )

    def adjust(self, finite: tf.Tensor) -> None:
        """Notes whether an update was finite; runs once an update, in a cross-replica context."""
        count, scale = self._finite + 1, tf.convert_to_tensor(self._scale)
        grown = count >= PATIENCE
        doubled = tf.where(grown, tf.minimum(scale * 2.0, MOST), scale)
        self._scale.assign(tf.where(finite, doubled, tf.maximum(scale / 2.0, LEAST)))
        self._finite.assign(tf.where(finite & ~grown, count, 0))
        self._skipped.assign(tf.where(finite, tf.constant(0, tf.int64), self._skipped + 1))

    def complaint(self) -> str | None:
        """Says that nothing is learnt any more, if updates keep being skipped."""
        if int(self._skipped.numpy()) < TOO_MANY:
            return None
        return (
            f"the last {TOO_MANY} updates or more were skipped: gradients were not finite in "
            "float16, however far the loss was scaled down; if the loss is finite with precision "
            "float32, take bfloat16."
        )


def _create_variable(value: float, dtype: tf.DType, name: str) -> tf.Variable:
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(value, dtype=dtype, trainable=False, name=name, aggregation=first)


def are_finite(gradients: Any) -> tf.Tensor:
    """Returns whether every entry of all gradients is finite, a scalar bool."""
    tensors = tf.nest.flatten(gradients, expand_composites=True)
    floating = [tensor for tensor in tensors if tensor.dtype.is_floating]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in floating])
