"""How many examples a batch holds, as the hook ``count_examples`` counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.helpers import DIFFER
from ctl_core.hooks import Hook, describe
from ctl_core.readers.stream import Looked, Stream, stream_of


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


def packed(dataset: tf.data.Dataset, parts: tuple[Any, ...]) -> Any:
    """Makes an element of what tf.data calls a function with."""
    return parts if isinstance(dataset.element_spec, tuple) else parts[0]


def checked_count(count_examples: Hook, element: Any) -> tf.Tensor:
    """Returns the same as an int64 tensor in a graph, which fails where the number is not clear."""
    number = examples_in(count_examples, element)
    if not tf.is_tensor(number):
        return tf.constant(number or 0, tf.int64)
    with tf.control_dependencies([tf.debugging.Assert(number >= 0, [DIFFER])]):
        return tf.identity(number)


def read_by(
    hook: Hook,
    made: Any,
    count_examples: Hook,
    remake: Callable[[], Any],
    looked: Looked | None = None,
    seed: int | None = None,
) -> Stream | None:
    """Returns how to read what a hook returned; None if it is no reader in Python.

    Args:
        hook: the hook
        made: what it returned
        count_examples: the hook of that name
        remake: calls the hook again
        looked: what was found out on what it returned before
        seed: of the run, whose reader has to give its state back; None: it is not asked for it

    Raises:
        SetupError: it cannot be read as it should.
    """

    def count(element: Any) -> int | None:
        number = examples_in(count_examples, element)
        return None if number is None else int(number)

    def anew() -> Any:
        assert seed is not None
        keras.utils.set_random_seed(seed)
        return remake()

    by_rows = count_examples.is_default
    return stream_of(
        hook, made, remake, None if by_rows else count, looked, None if seed is None else anew
    )
