"""``state``: the dict in which host hooks keep what they know, such as a plateau counter.

A checkpoint's record holds it, so that a resumed run goes on with what it had there. It may hold
JSON's values only, since nothing else would come back as it was; infinite and NaN floats do.
"""

from __future__ import annotations

from typing import Any

from ctl_core.errors import RunError

_PLAIN = frozenset({str, int, float, bool, type(None)})


def check_state(values: dict[str, Any], where: str) -> None:
    """Looks whether the dict would come back from a checkpoint as it is.

    Costs about as much as copying it; done after each hook that names it, and before it is saved.

    Args:
        values: the dict
        where: the hook that has just run, for the message

    Raises:
        RunError: it would not; the message says what of it, and what to do.
    """
    if why := _refusal(values, "state", {}):
        raise RunError(f"{where}: {why}")


def _refusal(value: Any, path: str, seen: dict[int, str]) -> str | None:
    """Returns why a value cannot be kept, or None; ``seen`` holds the lists and dicts above it."""
    if type(value) in _PLAIN:
        return None
    if type(value) not in (list, dict):
        return (
            f"{path} is a {_kind(value)}, which a checkpoint's record cannot hold; {_cure(value)}."
        )
    if id(value) in seen:
        return f"{path} is the same {_kind(value)} as {seen[id(value)]}; use a copy of it."
    seen[id(value)] = path
    if type(value) is list:
        if _PLAIN.issuperset(map(type, value)):
            return None
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    else:
        for key in value:
            if type(key) is not str:
                return f"{path} has the key {key!r} ({_kind(key)}); use str keys."
        parts = [(f"{path}[{key!r}]", part) for key, part in value.items()]
    return next((why for name, part in parts if (why := _refusal(part, name, seen))), None)


def _kind(value: Any) -> str:
    kind = type(value)
    module = kind.__module__.partition(".")[0]
    return kind.__name__ if module == "builtins" else f"{module} {kind.__name__}"


def _cure(value: Any) -> str:
    """Says what to write instead: numbers of NumPy and TensorFlow are what is meant, as a rule."""
    if isinstance(value, tuple | set | frozenset | range):
        return "use list(...)"
    for kind in (str, bool, int, float, dict):
        if isinstance(value, kind):  # a class of its own, such as np.float64 or a defaultdict
            return f"use {kind.__name__}(...)"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if len(value.shape):
            return "use tensor.numpy().tolist() or array.tolist()"
        whole = "int" in str(value.dtype)
        return f"use {'int' if whole else 'bool' if 'bool' in str(value.dtype) else 'float'}(...)"
    return "use numbers, strings, lists and dicts"
