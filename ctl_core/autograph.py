"""Hooks as AutoGraph converts them, and the way back from its lines to the user's."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core import defaults
from ctl_core.compat import source_map


def code_of(function: Callable[..., Any]) -> types.CodeType | None:
    """Returns the code of a function, of what a partial calls, or of an object's or class's own."""
    function = inspect.unwrap(getattr(function, "func", function))
    if inspect.isclass(function):
        own = [part for part in vars(function).values() if inspect.isfunction(part)]
        return own[0].__code__ if own else None
    return getattr(function, "__code__", None) or getattr(_call_of(function), "__code__", None)


def names_in(function: Callable[..., Any]) -> set[str]:
    """Returns the names that a function's code uses, also in functions within it."""
    found, codes = set(), [code_of(function)]
    while codes:
        if (code := codes.pop()) is not None:
            found |= {*code.co_names}
            codes += [part for part in code.co_consts if inspect.iscode(part)]
    return found


def _call_of(instance: Any) -> Any:
    return getattr(type(instance), "__call__", None)  # noqa: B004


def traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Converts a graph hook with AutoGraph, where it has Python source to convert.

    What surrounds the source is kept: a method its object, a partial its arguments, a decorated
    function its decorator. A tf.function does its own converting. The defaults need none, and
    converting costs a fortieth of a second each.
    """
    if is_default(function):
        return function
    if isinstance(function, functools.partial):
        inner = traceable(function.func)
        return functools.partial(inner, *function.args, **function.keywords)
    if inspect.ismethod(function):
        return functools.partial(traceable(function.__func__), function.__self__)
    if isinstance(function, tf.types.experimental.Callable):
        return function
    if not inspect.isfunction(function):
        call = _call_of(function)
        return (
            functools.partial(traceable(call), function) if inspect.isfunction(call) else function
        )
    try:
        converted = tf.autograph.to_graph(function)
    except Exception:  # no source, as in some notebooks: it runs as it is
        return function
    return converted  # type: ignore[no-any-return]


def is_default(function: Callable[..., Any]) -> bool:
    """Whether a function does what one of the engine's defaults does, such as its copy."""
    default = getattr(defaults, getattr(function, "__name__", ""), None)
    if not inspect.isfunction(function) or not inspect.isfunction(default):
        return False

    def same(one: types.CodeType, other: types.CodeType) -> bool:
        alike = ("co_code", "co_names", "co_varnames", "co_freevars")
        constants = zip(one.co_consts, other.co_consts, strict=False)
        return (
            all(getattr(one, part) == getattr(other, part) for part in alike)
            and len(one.co_consts) == len(other.co_consts)
            and all(same(a, b) if inspect.iscode(a) and inspect.iscode(b) else a == b
                    for a, b in constants)
        )  # fmt: skip

    if function.__defaults__ != default.__defaults__:
        return False
    return same(function.__code__, default.__code__) and all(
        function.__globals__.get(name) is default.__globals__.get(name)
        for name in names_in(function)
    )


def where(function: Callable[..., Any]) -> str:
    """Returns ``callbacks.py:12`` for the function's definition, or its module's name."""
    code = code_of(function)
    if code is None:
        return getattr(function, "__module__", None) or "callbacks"
    if code.co_filename == defaults.__file__:
        return "the engine's default"
    return f"{file_name(code.co_filename)}:{code.co_firstlineno}"


def file_name(path: str) -> str:
    """Returns the name of a source file as messages show it; of a notebook's cell, ``cell 3``.

    A kernel gives cells the names of files that are not there. IPython knows the number of the
    cell that each stands for, or the name has it; otherwise it is ``cell``.
    """
    if found := re.search(r"<ipython-input-(\d+)-", path):
        return f"cell {found[1]}"
    if not re.search(r"ipykernel_\d+[/\\]", path):
        return Path(path).name
    kernel = sys.modules.get("IPython")
    shell = kernel.get_ipython() if kernel is not None else None
    label = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(path)
    number = re.search(r"\d+", " ".join(label or ()))
    return f"cell {number[0]}" if number else "cell"


def original_lines(converted: Callable[..., Any]) -> dict[tuple[str, int], tuple[str, int]]:
    """Maps lines of AutoGraph's generated file to those of the source.

    Without that messages fall back to the line of the hook's definition.
    """
    while isinstance(converted, functools.partial):
        converted = converted.func
    return source_map(converted)


def frames_in(text: str) -> list[tuple[str, int]]:
    """Reads the frames off a stack that is part of a message: (file, line), outermost first."""
    found = re.findall(r'^\s*File "([^"\n]+)", line (\d+), in ', text, re.MULTILINE)
    return [(filename, int(line)) for filename, line in found]
