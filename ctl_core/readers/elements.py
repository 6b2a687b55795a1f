"""What readers give, as tensors: arrays of a structure and of types that do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.helpers import DIFFER

_SCALARS = (bool, int, float, str, bytes, np.generic)


class ReadError(ValueError):
    """An element that cannot be a tensor, or is unlike the others; the message says how."""


def arrays(element: Any) -> Any:
    """Returns an element with an array for each tensor; lists of arrays become tuples, as in Keras.

    Raises:
        ReadError: part of it is no array, nor can it be made one.
    """
    if isinstance(element, np.ndarray) and element.dtype != object:
        return element
    if isinstance(element, dict):
        return {key: arrays(part) for key, part in element.items()}
    if isinstance(element, tuple) or (
        isinstance(element, list) and not all(isinstance(part, _SCALARS) for part in element)
    ):
        parts = [arrays(part) for part in element]
        return type(element)(*parts) if hasattr(element, "_fields") else tuple(parts)
    if element is None or isinstance(element, tf.RaggedTensor | tf.SparseTensor):
        raise ReadError(f"an element holds a {type(element).__name__}, expected arrays")
    array = np.asarray(element)
    if array.dtype == object and all(isinstance(part, str | bytes) for part in array.flat):
        return array
    try:
        tf.as_dtype(array.dtype)
    except TypeError as error:
        raise ReadError(f"an element holds a {type(element).__name__}, expected arrays") from error
    if array.dtype == object:
        raise ReadError(f"an element holds a {type(element).__name__}, expected arrays")
    return array


def spec_of(elements: list[Any]) -> Any:
    """Returns what elements have in common: no first dimension, others where all have the same.

    Args:
        elements: of arrays, at least one

    Raises:
        ReadError: they differ in more than sizes.
    """
    first = elements[0]
    for other in elements[1:]:
        try:
            tf.nest.assert_same_structure(first, other)
        except (TypeError, ValueError) as error:
            raise unlike(other, shown(first)) from error

    def spec(*parts: np.ndarray) -> tf.TensorSpec:
        one = parts[0]
        for part, element in zip(parts, elements, strict=True):
            if part.ndim != one.ndim or _type(part) != _type(one):
                raise unlike(element, shown(first))
        sizes = [dims[0] if len({*dims}) == 1 else None for dims in _dimensions(parts)]
        return tf.TensorSpec([None, *sizes[1:]] if sizes else [], _type(one))

    return tf.nest.map_structure(spec, *elements)


def _dimensions(parts: tuple[np.ndarray, ...]) -> list[tuple[int, ...]]:
    return list(zip(*(part.shape for part in parts), strict=True))


def _type(array: np.ndarray) -> tf.DType:
    return tf.as_dtype(array.dtype)


def fits(spec: Any) -> Callable[[Any], None]:
    """Returns a function that refuses elements that do not fit a specification."""
    flat = tf.nest.flatten(spec)
    wanted = [(one.dtype, one.shape.as_list()) for one in flat]

    def check(element: Any) -> None:
        parts = tf.nest.flatten(element)
        if len(parts) != len(wanted) or not all(map(one_fits, parts, wanted)):
            raise unlike(element, shown(spec))

    def one_fits(part: np.ndarray, want: tuple[tf.DType, list[int | None]]) -> bool:
        kind, sizes = want
        if len(part.shape) != len(sizes) or _type(part) != kind:
            return False
        return all(size is None or size == own for own, size in zip(part.shape, sizes, strict=True))

    return check


def unlike(element: Any, expected: str) -> ReadError:
    """Returns the error for an element that is unlike the first ones."""
    return ReadError(
        f"an element is {shown(element)}, expected {expected}, as the first ones are; where sizes "
        "vary, give the reader an attribute element_spec that says so, of tf.TensorSpec with None"
    )


def shown(element: Any) -> str:
    """Writes down the structure of arrays: ``(float32[32, 8], int64[32])``."""
    if isinstance(element, dict):
        return "{" + ", ".join(f"{key}: {shown(part)}" for key, part in element.items()) + "}"
    if isinstance(element, tuple):
        return "(" + ", ".join(map(shown, element)) + ")"
    return f"{tf.as_dtype(element.dtype).name}{[*element.shape]}"


def rows(element: Any) -> int | None:
    """Returns the first dimension of arrays, which all have to share; None if they are scalars.

    Raises:
        ReadError: they do not.
    """
    found = {part.shape[0] for part in tf.nest.flatten(element) if part.ndim}
    if len(found) > 1:
        raise ReadError(f"{DIFFER} [{shown(element)}]")
    return found.pop() if found else None


def same(one: Any, other: Any) -> bool:
    """Whether two elements are equal bit by bit."""
    parts, others = tf.nest.flatten(one), tf.nest.flatten(other)
    return len(parts) == len(others) and all(map(_equal, parts, others))


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (
        one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()
    )
