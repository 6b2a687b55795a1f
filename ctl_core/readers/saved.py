"""A reader's state as a text and back, without pickle: a checkpoint may come from anywhere.

The text is a Python literal, so that tuples, bytes and numbers as keys are what they were; arrays,
and tensors of PyTorch, are dicts that say what they are.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

import numpy as np

_ARRAY = "__array__"


def write_literal(value: Any) -> str:
    """Returns the text of a state.

    Raises:
        ValueError: part of it is no number, text, bytes, array, nor a list, tuple or dict of such.
    """
    return repr(_encode(value))


def read_literal(text: str) -> Any:
    """Returns the state of a text.

    Raises:
        ValueError, SyntaxError: it is none.
    """
    return _decode(ast.literal_eval(text))


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {_encode(key): _encode(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_encode, value))
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return {_ARRAY: (value.dtype.str, value.shape, value.tobytes(), type(value).__name__)}
    if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        array = value.detach().cpu().numpy()
        return {_ARRAY: (array.dtype.str, array.shape, array.tobytes(), "Tensor")}
    plain = value is None or type(value) in (bool, int, str, bytes)
    if plain or (type(value) is float and np.isfinite(value)):
        return value
    raise ValueError(f"the reader's state holds a {type(value).__name__}: {value!r:.50}")


def _decode(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_decode, value))
    if not isinstance(value, dict):
        return value
    if set(value) != {_ARRAY}:
        return {_decode(key): _decode(part) for key, part in value.items()}
    dtype, shape, content, kind = value[_ARRAY]
    array = np.frombuffer(content, dtype).reshape(shape).copy()
    if kind == "Tensor":
        return sys.modules["torch"].from_numpy(array)
    return array if kind == "ndarray" else array[()]
