"""The ways in which a run can end badly, each with its exit code, and what their messages name.

Whatever the engine raises on purpose is one of these, with a message of one line: what, where,
what was expected, what to do. ``__main__`` prints the line; the traceback goes to train.log.
"""

import difflib
import inspect
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Colours and other commands to a terminal; Keras puts them into its messages.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What TensorFlow wraps around the message of an op that failed: where it was made, its name.
_PLACES = re.compile(
    r"Graph execution error:\s*"
    r"|Detected at node .*?\(most recent call last\):\s*"
    r"(?:<stack traces unavailable>\s*|(?:\s*File \"[^\n]*\", line \d+, in [^\n]*\n)+)"
    r"|\d+ root error\(s\) found\.\s*\(0\) \w+:\s*"
    r"|\n\t \[\[(?:(?:\{\{[^}]*\}\})+|[\w./-]*)\]\]"
    r"|\{\{function_node [^}]*\}\} ?|\[Op:\w+\]( name:[^\n]*)?"
    r"|Error in user-defined function passed to \S+ transformation with iterator: \S+: "
    r"|Could not automatically infer .*?\bError encountered:\s*"  # of a layer, by Keras
    r"|Exception encountered when calling [\w.]+\(\)\.\s*| with name 'None'",
    re.DOTALL,
)
# What follows a message: another one, and what only helps beside the traceback.
_APPENDED = (
    "\n  (1) ",
    "Arguments received by ",
    " Hint: If you want to see",
    "You can attempt the following resolutions",
    "\n\nStack trace for op definition: ",
)


class CtlError(Exception):
    """Base of the engine's own errors; ``exit_code`` is what the command returns."""

    exit_code = 1


class SetupError(CtlError):
    """Wrong usage, settings or hooks, found before training starts (exit code 2)."""

    exit_code = 2


class RunError(CtlError):
    """A failure while running: a hook raised, a file could not be written (exit code 1)."""


class PeerLost(RunError):
    """Another process of the cluster is gone (exit code 75: starting all again helps)."""

    exit_code = 75


class StopTraining(CtlError):
    """For hooks to raise in ``every_steps`` or ``at_step``: training ends here, as if done.

    The run is evaluated and saved, and the exit code is 0. Started again, it says so; with more
    steps than it was to take, or ``--continue``, it goes on.
    """


class HookFailed(RunError):
    """A hook raised. The message names the hook, its file and line, and the exception."""


def make_line(text: object, limit: int = 400) -> str:
    """Squeezes a message into one line of at most ``limit`` characters, without colours."""
    line = " ".join(_ESCAPES.sub("", str(text)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def quote(value: Any, limit: int = 80) -> str:
    """Returns a value as messages show it, in one line of at most so many characters."""
    return make_line(repr(value), limit)


def format_name(text: object) -> str:
    """Returns a path or a name as messages show it: in one line, without quotes."""
    return quote(str(text))[1:-1]


def suggest(name: str, names: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the nearest of ``names``, or an empty string."""
    names = list(names)
    close = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.5)
    close += [other for other in names if len(name) > 2 and name in other]
    return f"; did you mean '{close[0]}'?" if close else ""


def format_error(error: BaseException, limit: int = 300) -> str:
    """Returns ``ValueError: its message`` in one line, without what TensorFlow and Keras add.

    That is stacks, node names, and the arguments of a layer's call; all of it is in the traceback.
    It is taken out by the form of the text, since the exceptions have no attributes for it; where
    the form changes, the message is longer.
    """
    kind, text = type(error).__name__, _ESCAPES.sub("", str(error))
    if text.startswith("in user code:"):  # a function of tf.data's: the message is the last part
        text = text.rpartition(f"    {kind}: ")[2]
    text, traceback, _ = _PLACES.sub("", text).partition("Traceback (most recent call last):")
    if traceback and re.match(r"\w+: ", text.lstrip()):  # Python inside an op, as py_function runs
        kind, _, text = text.lstrip().partition(": ")
    for end in _APPENDED:
        text = text.split(end)[0]
    text = make_line(re.sub(r"\{\{node ([^}]*)\}\}", r"\1", text), limit)
    return f"{kind}: {text}" if text else kind


ENGINE = str(Path(__file__).parents[1])
NOT_THE_USERS = (  # in the names of source files
    ENGINE,
    sysconfig.get_paths()["stdlib"],
    "site-packages",
    "dist-packages",
    "__autograph_generated",
)


def find_code(function: Callable[..., Any]) -> types.CodeType | None:
    """Returns the code of a function, of what a partial calls, or of an object's or class's own."""
    function = inspect.unwrap(getattr(function, "func", function))
    own = vars(function).values() if inspect.isclass(function) else [type(function).__call__]
    codes = (getattr(part, "__code__", None) for part in (function, *own))
    return next((code for code in codes if code is not None), None)


def locate(function: Callable[..., Any]) -> str:
    """Returns ``callbacks.py:12`` for the function's definition, or its module's name."""
    code = find_code(function)
    if code is None:
        return getattr(function, "__module__", None) or "callbacks"
    if getattr(function, "__module__", None) == "ctl_core.hooks.defaults":
        return "the engine's default"
    return f"{format_file_name(code.co_filename)}:{code.co_firstlineno}"


def format_file_name(path: str) -> str:
    """Returns the name of a source file as messages show it; of a notebook's cell, ``cell 3``.

    A kernel gives cells the names of files that are not there; IPython knows which cell each is.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_cell = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(path)
    number = re.search(r"\d+", " ".join(name_cell or ()))
    return f"cell {number[0]}" if number else "cell" if "ipykernel" in path else Path(path).name


def find_users_line() -> str:
    """Returns ``callbacks.py:14`` for the innermost line of the user's code that is running."""
    frames = reversed(traceback.extract_stack())
    for frame in frames:
        if not any(part in frame.filename for part in NOT_THE_USERS):
            return f"{format_file_name(frame.filename)}:{frame.lineno}"
    return "callbacks"


def read_frames(op: Any) -> list[tuple[str, int]]:
    """Returns where an op of a graph was made: (file, line), outermost first."""
    return [(frame.filename, frame.lineno) for frame in op.traceback or ()]


def read_calls(op: Any) -> list[tuple[str, int, str]]:
    """Returns the calls that made an op of a graph: (file, line, function), outermost first."""
    return [(frame.filename, frame.lineno, frame.name) for frame in op.traceback or ()]


def parse_frames(text: str) -> list[tuple[str, int]]:
    """Reads the frames off a stack that is part of a message: (file, line), outermost first."""
    found = re.findall(r'^\s*File "([^"\n]+)", line (\d+), in ', text, re.MULTILINE)
    return [(filename, int(line)) for filename, line in found]
