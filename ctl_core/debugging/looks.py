"""A look at what a step has returned: one small graph call of its own, traced once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def traced(function: Callable[..., Any], values: tuple[Any, ...]) -> Callable[..., Any]:
    """Traces a function for values such as these; sparse ones may have any number of rows.

    Args:
        function: of so many arguments
        values: for them, structures of eager tensors
    """

    def spec(part: tf.Tensor) -> tf.TensorSpec:
        shape = [None, *part.shape[1:]] if part.shape.rank else part.shape
        return tf.TensorSpec(shape, part.dtype)

    def flat(values: tuple[Any, ...]) -> list[tf.Tensor]:
        return tf.nest.flatten(values, expand_composites=True)  # type: ignore[no-any-return]

    @tf.function(autograph=False, input_signature=[[spec(part) for part in flat(values)]])
    def on_flat(parts: list[tf.Tensor]) -> Any:
        return function(*tf.nest.pack_sequence_as(values, parts, expand_composites=True))

    concrete = on_flat.get_concrete_function()
    return lambda *values: concrete(flat(values))
