"""Temporarily replaces attributes of TensorFlow's and Keras' classes and objects."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Scope: TypeAlias = contextlib.AbstractContextManager[None]


@dataclasses.dataclass
class _Patch:
    """The original value of a replaced attribute, and the number of contexts that replace it."""

    original: Any
    users: int = 0


Owner: TypeAlias = type | types.ModuleType

_MISSING = object()
_lock = threading.RLock()
_patches: dict[tuple[Owner, str], _Patch] = {}


@contextlib.contextmanager
def replace_attribute(owner: Owner, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute of a class or module as long as any thread is inside this context.

    Args:
        owner: the class or module
        name: the name of the attribute
        replace: a function that returns the replacement, given the original value. The original
            value is None if ``owner`` itself does not have the attribute
    """
    key = (owner, name)
    with _lock:
        if key not in _patches:
            original = vars(owner).get(name, _MISSING)
            _patches[key] = _Patch(original)
            setattr(owner, name, replace(None if original is _MISSING else original))
        _patches[key].users += 1
    try:
        yield
    finally:
        with _lock:
            _patches[key].users -= 1
            if _patches[key].users == 0:
                original = _patches.pop(key).original
                if original is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def wrap_function(owner: Owner, name: str, wrapper: Callable[..., Any]) -> Scope:
    """Replaces a function or method as long as any thread is inside this context.

    Args:
        owner: the module or class
        name: the name of the function
        wrapper: the function that is called instead. Its arguments are the original function,
            followed by the arguments of the call
    """
    return replace_attribute(owner, name, functools.partial(_bind_original, wrapper))


def _bind_original(
    wrapper: Callable[..., Any], original: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Binds the original function to a wrapper.

    Returns a function, because a ``partial`` object in a class would not become a method.
    """

    def call_wrapper(*args: Any, **options: Any) -> Any:
        return wrapper(original, *args, **options)

    return call_wrapper


@contextlib.contextmanager
def set_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Temporarily sets attributes of an object. A missing attribute is None afterwards."""
    before = {name: getattr(owner, name, None) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
