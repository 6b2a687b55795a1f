"""How many examples a batch holds, as the hook ``count_examples`` counts them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ctl_core.hooks import Hook, describe


def examples_in(count_examples: Hook, batch: Any) -> Any:
    """Returns how many examples a batch holds, as the hook counts them.

    Returns:
        A number where it is fixed, otherwise a scalar int64 tensor; None for a single example.

    Raises:
        SetupError: the hook returns something else.
    """
    number = count_examples.in_graph(batch=batch)
    if number is None:
        return None
    tensor = tf.convert_to_tensor(number)
    if tensor.shape.rank != 0 or not tensor.dtype.is_integer:
        raise count_examples.reject(
            f"returned {describe(tensor)}, expected how "
            "many examples the batch holds, a whole number."
        )
    static = tf.get_static_value(tensor)
    return tf.cast(tensor, tf.int64) if static is None else int(static)
