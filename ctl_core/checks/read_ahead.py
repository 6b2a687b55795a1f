"""What host hooks change of what the data are made of: data are read ahead of the steps.

A replay buffer in a list, a level of difficulty in a global: how far the reading is ahead differs
from run to run, and so would the weights. What both name is compared before and after a hook.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
import types
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.console import Console
from ctl_core.hooks import Hook, Hooks
from ctl_core.run_state.tracking import is_own_file, parts_of, plain_variable

# So many seconds of a run, of the processor, are spent with looking.
_PATIENCE = 0.5
# So deep, and so far into a sequence, an object is looked into; arrays of more bytes are not.
_DEPTH, _LONG, _LARGE = 4, 100, 2**24
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class ReadAhead:
    """Looks whether host hooks change what data hooks read; warns once."""

    def __init__(self, hooks: Hooks, console: Console) -> None:
        self._console = console
        self._data = hooks.data_functions()
        self._seconds = 0.0
        self._apart: set[int] = set()  # ids of hooks that have nothing in common with those

    @contextlib.contextmanager
    def watched(self, hook: Hook) -> Iterator[None]:
        """Compares before and after a host hook what it has in common with the data hooks."""
        looks = self._seconds < _PATIENCE and hook.name != "at_end"
        before = self._shared(hook) if looks and id(hook) not in self._apart else {}
        yield
        if not before:
            self._apart |= {id(hook)} if looks else set()
            return
        after = self._shared(hook)
        for path, (reader, value) in before.items():
            if path not in after or after[path][1] != value:
                name = path.rpartition("/")[2]
                self._console.warn(
                    f"{hook} changes {name}, of which {reader} makes data: these are read ahead of "
                    "the steps, so that no two runs are alike. Keep it in a variable of the model, "
                    "or work it out from step in a hook of the graph."
                )
                self._seconds = _PATIENCE
                return

    def _shared(self, hook: Hook) -> dict[str, tuple[str, Any]]:
        """Returns what both name, by path: the data hook, and what tells a change."""
        began = time.thread_time()
        found: dict[str, tuple[str, Any]] = {}
        if own := _reached(hook.function):
            for reader, function in self._data.items():
                for path, value in _reached(function).items():
                    if path in own and path not in found:
                        found[path] = (reader, _print(value, _DEPTH))
        self._seconds += time.thread_time() - began
        return found


def _reached(function: Any) -> dict[str, Any]:
    """Returns what a function and those that it calls name in the user's files, by path."""
    found: dict[str, Any] = {}
    queue, seen = collections.deque([function]), set[int]()
    while queue:
        item = queue.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        for path, value in _named(item):
            if _is_code(value):
                queue.append(value)
                continue
            if isinstance(value, types.ModuleType):
                continue
            # A global by its name, which may be bound anew; what a closure has by what it is.
            found[path if path.startswith("/") else f"{id(value)}/{path}"] = value
            if _is_own(value.__class__):
                queue.append(value.__class__)
    return found


def _named(item: Any) -> Iterable[tuple[str, Any]]:
    """Returns what a function, or those of a class, name."""
    if isinstance(item, functools.partial):
        return [("", item.func), *((str(i), part) for i, part in enumerate(item.args))]
    if isinstance(item, type) and _is_own(item):
        return [("", part) for part in vars(item).values() if _is_code(part)]
    return parts_of(item) if _is_code(item) else []


_CODE = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    property,
    staticmethod,
    classmethod,
    type,
    tf.types.experimental.PolymorphicFunction,
)


def _is_code(value: Any) -> bool:
    return isinstance(value, _CODE)


@functools.lru_cache(maxsize=1024)
def _is_own(kind: type) -> bool:
    """Whether a class is of the user's files."""
    functions = (part for part in vars(kind).values() if isinstance(part, types.FunctionType))
    return any(is_own_file(function.__code__.co_filename) for function in functions)


def _print(value: Any, depth: int) -> Any:
    """Returns something that is another where a value has changed."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.ndarray | np.generic):
        size = value.dtype, value.shape
        if value.nbytes > _LARGE or value.dtype.hasobject:
            return size
        return *size, zlib.crc32(np.ascontiguousarray(value).tobytes())
    if isinstance(plain := plain_variable(value), tf.Variable):
        one = getattr(plain, "values", [plain])[0]  # of replicas, the first one's, without a sum
        return _print(one.numpy(), depth)
    if isinstance(value, keras.Layer):
        return [_print(variable, depth) for variable in value.variables]
    if depth and isinstance(value, dict):  # copied at once: a thread may read and write it
        return hash(tuple(map(id, value))), _print([*value.values()], depth)
    if depth and isinstance(value, list | tuple | collections.deque):
        some = [*value][-_LONG:]
        return hash(tuple(map(id, value))), [_print(part, depth - 1) for part in some]
    if isinstance(value, set | frozenset):
        return hash(frozenset(map(id, value)))
    if depth and _is_own(value.__class__):
        return _print(getattr(value, "__dict__", {}), depth - 1)
    return id(value)
