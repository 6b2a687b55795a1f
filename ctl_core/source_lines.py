"""Where a function stands in the user's files: the line that a message names."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENGINE = str(Path(__file__).parent)
_NOT_OURS = (
    ENGINE,
    sysconfig.get_paths()["stdlib"],
    "site-packages",
    "dist-packages",
    "__autograph_generated",
)


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
    if getattr(function, "__module__", None) == "ctl_core.defaults":
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


def is_own_file(name: str) -> bool:
    """Whether a source file is the user's own: of no library, and not made by AutoGraph."""
    return not any(part in name for part in _NOT_OURS)


def frames_of(op: Any) -> list[tuple[str, int]]:
    """Returns where an op of a graph was made: (file, line), outermost first."""
    return [(frame.filename, frame.lineno) for frame in op.traceback or ()]


def frames_in(text: str) -> list[tuple[str, int]]:
    """Reads the frames off a stack that is part of a message: (file, line), outermost first."""
    found = re.findall(r'^\s*File "([^"\n]+)", line (\d+), in ', text, re.MULTILINE)
    return [(filename, int(line)) for filename, line in found]
