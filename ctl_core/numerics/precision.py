"""Mixed precision: the Keras policy of a run. The loss scale of float16 is in not_finite.py.

Variables, losses, gradients and updates are float32 in every precision; layers compute in the
lower one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

_LOWER = (tf.float16, tf.bfloat16)


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


def to_float32(structure: Any) -> Any:
    """Casts the float16 and bfloat16 tensors of a structure, ragged ones too, to float32."""

    def is_lower(part: Any) -> bool:
        return tf.is_tensor(part) and part.dtype in _LOWER

    if not any(map(is_lower, tf.nest.flatten(structure))):
        return structure
    return tf.nest.map_structure(
        lambda part: tf.cast(part, tf.float32) if is_lower(part) else part, structure
    )
