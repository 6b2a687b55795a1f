"""A reader's state as JSON and back, without pickle: a checkpoint may come from anywhere.

Numbers, texts, None, lists and dicts with texts for keys are themselves; tuples, bytes, arrays,
NumPy's numbers, other dicts and tensors of PyTorch are dicts that say what they are.
"""

from __future__ import annotations

import base64
import sys
from typing import Any

import numpy as np

_KIND = "__kind__"


class NotPlain(Exception):
    """A value that has no form in JSON; the message says which it is and where."""


def encoded(value: Any, where: str = "") -> Any:
    """Returns a value made of what JSON has; it shares nothing with the one given.

    Args:
        value: the state
        where: of it this is, for the message, such as ``['sampler'][0]``

    Raises:
        NotPlain: part of it is of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encoded(part, f"{where}[{index}]") for index, part in enumerate(value)]
    if type(value) is dict:
        if _KIND not in value and all(type(key) is str for key in value):
            return {key: encoded(part, f"{where}[{key!r}]") for key, part in value.items()}
        pairs = [
            [encoded(key, f"{where} key"), encoded(part, f"{where}[{key!r}]")]
            for key, part in value.items()
        ]
        return {_KIND: "dict", "pairs": pairs}
    if type(value) is tuple:
        return {_KIND: "tuple", "parts": encoded(list(value), where)}
    if isinstance(value, bytes | bytearray):
        return {_KIND: type(value).__name__, "base64": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSUmM":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        content = base64.b64encode(np.asarray(value, order="C").tobytes()).decode()
        return {_KIND: kind, "dtype": value.dtype.str, "shape": [*value.shape], "base64": content}
    if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        return {_KIND: "torch", "array": encoded(value.detach().cpu().numpy(), where)}
    name, module = type(value).__name__, type(value).__module__
    raise NotPlain(f"{where or 'it'} is a {name if module == 'builtins' else f'{module}.{name}'}")


def decoded(value: Any) -> Any:
    """Returns what ``encoded`` was given.

    Raises:
        ValueError: it is not what ``encoded`` gives.
    """
    if isinstance(value, list):
        return [decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    try:
        if kind is None:
            return {key: decoded(part) for key, part in value.items()}
        if kind == "dict":
            return {decoded(key): decoded(part) for key, part in value["pairs"]}
        if kind == "tuple":
            return tuple(decoded(value["parts"]))
        if kind in ("bytes", "bytearray"):
            content = base64.b64decode(value["base64"], validate=True)
            return bytearray(content) if kind == "bytearray" else content
        if kind in ("array", "number"):
            content = base64.b64decode(value["base64"], validate=True)
            array = np.frombuffer(content, value["dtype"]).reshape(value["shape"]).copy()
            return array if kind == "array" else array[()]
        if kind == "torch":
            return sys.modules["torch"].from_numpy(decoded(value["array"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the part of a state that says {kind!r} cannot be read") from error
    raise ValueError(f"a part of a state says {kind!r}, which is not known")
