"""Where a function stands in the user's files, and whether it is a copy of a default."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ctl_core import defaults


def code_of(function: Callable[..., Any]) -> types.CodeType | None:
    """Returns the code of a function, of what a partial calls, or of an object's or class's own."""
    function = inspect.unwrap(getattr(function, "func", function))
    own = vars(function).values() if inspect.isclass(function) else [type(function).__call__]
    codes = (getattr(part, "__code__", None) for part in (function, *own))
    return next((code for code in codes if code is not None), None)


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

    A kernel gives cells the names of files that are not there; IPython knows which cell each is.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    label = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(path)
    number = re.search(r"\d+", " ".join(label or ()))
    return f"cell {number[0]}" if number else "cell" if "ipykernel" in path else Path(path).name


def frames_in(text: str) -> list[tuple[str, int]]:
    """Reads the frames off a stack that is part of a message: (file, line), outermost first."""
    found = re.findall(r'^\s*File "([^"\n]+)", line (\d+), in ', text, re.MULTILINE)
    return [(filename, int(line)) for filename, line in found]


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
