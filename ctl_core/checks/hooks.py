"""What callbacks.py defines: refused where it is wrong, before anything of it is called."""

from __future__ import annotations

import ast
import difflib
import inspect
import numbers
import textwrap
import types
from collections.abc import Callable
from typing import Any

from ctl_core import defaults
from ctl_core.errors import SetupError, one_line
from ctl_core.settings import nearest
from ctl_core.source_lines import code_of, where
from ctl_core.table import COMMON, DEFERRED, SPECS, TABLE, Spec

_NO_HOOKS = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_required(callbacks: Any, origin: str) -> None:
    """Refuses callbacks that lack what has no default."""
    missing = [
        spec.name for spec in TABLE if spec.kind == "required" and not hasattr(callbacks, spec.name)
    ]
    if not missing:
        return
    spec = SPECS[missing[0]]
    close = [name for name in dir(callbacks) if _meant(callbacks, name) == spec.name]
    raise SetupError(
        f"{origin}: {', '.join(missing)} still to be written; the first is "
        f"def {spec.name}({', '.join(spec.arguments)}), which returns {spec.returns}."
        + (f" There is a {close[0]}: is it misspelt?" if close else "")
    )


def scheduled(spec: Spec, value: Any, origin: str) -> dict[int, list[Callable[..., Any]]]:
    """Returns the functions of a schedule by step number, if it is one."""
    if not isinstance(value, dict):
        raise _not_a(f"{spec.name} must be a dict {{N: function}}", value, origin)
    schedule = {}
    for key, functions in value.items():
        if isinstance(key, bool) or not isinstance(key, numbers.Integral) or key < 1:
            raise SetupError(
                f"{origin}: {spec.name} has the key {key!r}; expected a step number, a whole "
                "number from 1 up."
            )
        schedule[int(key)] = [function for _, function in in_order(spec, functions)]
    return schedule


def in_order(spec: Spec, value: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Returns the functions of a hook that may be several, each with what to call it."""
    if isinstance(value, list | tuple):
        return [(f"{spec.name}[{index}]", function) for index, function in enumerate(value)]
    return [] if value is None else [(spec.name, value)]


def listed(spec: Spec, value: Any, origin: str) -> tuple[str, ...]:
    """Returns a list of names, if it is one; None is an empty one."""
    names = () if value is None else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _not_a(f"{spec.name} must be a {spec.returns}", value, origin)
    return tuple(names)


def _not_a(expected: str, value: Any, origin: str) -> SetupError:
    return SetupError(f"{origin}: {expected}, got {one_line(repr(value), 60)}.")


def arguments_of(spec: Spec, name: str, function: Any, origin: str) -> tuple[str, ...]:
    """Returns the arguments that a hook's function names, if it may name all of them.

    Args:
        spec: the hook's row of the table
        name: what to call the hook: ``update_pre``, ``every_steps[10]``
        function: the user's, or a default
        origin: where it comes from, if it is not known where it is defined
    """
    if not callable(function):
        raise _not_a(f"{name} must be a function", function, origin)
    hook = f"{where(function) if code_of(function) else origin}: {name}"
    if any(is_kind(inspect.unwrap(function)) for is_kind in _NO_HOOKS):
        raise SetupError(
            f"{hook} is a generator or a coroutine, whose body would not run; leave out yield and "
            "async."
        )
    deferred = spec.kind == "by step" and getattr(function, "deferred", False)
    valid = (*(DEFERRED if deferred else spec.arguments), *COMMON)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise SetupError(f"{hook}: {error}; write a function that names its arguments.") from None
    for parameter in parameters:
        if parameter.kind not in _BY_NAME:
            raise SetupError(
                f"{hook} takes {parameter}; a hook gets its arguments by name, so write out the "
                f"ones it uses, of {', '.join(valid)}."
            )
        if parameter.name not in valid and parameter.default is parameter.empty:
            raise SetupError(
                f"{hook}{' is @deferred and' * deferred} asks for '{parameter.name}'"
                f"{nearest(parameter.name, valid) or ';'} it may name {', '.join(valid)}."
            )
    return tuple(parameter.name for parameter in parameters if parameter.name in valid)


def misspelt(callbacks: Any, origin: str) -> list[str]:
    """Warns of what no hook uses but whose name is a hook's, all but a slip."""
    return [
        f"{origin}: {name} is no hook and is not used; did you mean {close}?"
        for name in dir(callbacks)
        if (close := _meant(callbacks, name))
    ]


def _meant(callbacks: Any, name: str) -> str | None:
    """Returns the hook that an attribute looks like without being one."""
    value = inspect.getattr_static(callbacks, name)
    could_be = callable(value) or isinstance(value, dict | list)
    if name in SPECS or name.startswith("_") or not could_be:
        return None
    short = name.replace("optimizer", "opt").replace("checkpoint", "ckpt")
    close = difflib.get_close_matches(short, SPECS, n=1, cutoff=0.88)
    return close[0] if close else None


def is_default(name: str, function: Any) -> bool:
    """Whether a function is the hook's default, or a copy of it in another file.

    A docstring, annotations and comments change nothing; what its names stand for has to be the
    same.
    """
    default = getattr(defaults, name, None)
    if not (inspect.isfunction(function) and inspect.isfunction(default)) or function.__closure__:
        return False
    own, tree = (_parse_body(each) for each in (function, default))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return ast.dump(own) == ast.dump(tree) and all(
        function.__globals__.get(name) is vars(defaults)[name]
        for name in names & vars(defaults).keys()
    )


def _parse_body(function: types.FunctionType) -> ast.AST:
    """Returns the syntax of a function without docstring and annotations; without source, none."""
    try:
        # Of the code, since a decorator's wrapper stands for what it wraps.
        source = inspect.getsource(function.__code__)
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, SyntaxError):
        return ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                del node.body[0]
    return tree
