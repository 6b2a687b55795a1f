"""The engine's exceptions with their exit codes, and functions that format their messages.

The engine raises only these exceptions on purpose. The message of each is a single line with the
place, the problem, the expected value and the remedy. ``__main__`` prints the line; the traceback
is written to train.log.
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
from typing import Any, Protocol

# Terminal escape sequences such as colors, which Keras puts into its messages.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Matches text that TensorFlow and Keras add to the message of a failed op, such as the op's name
# and the stack that created the op.
_PLACES = re.compile(
    r"Graph execution error:\s*"
    r"|Detected at node .*?\(most recent call last\):\s*"
    r"(?:<stack traces unavailable>\s*|(?:\s*File \"[^\n]*\", line \d+, in [^\n]*\n)+)"
    r"|\d+ root error\(s\) found\.\s*\(0\) \w+:\s*"
    r"|\n\t \[\[(?:(?:\{\{[^}]*\}\})+|[\w./-]*)\]\]"
    r"|\{\{function_node [^}]*\}\} ?|\[Op:\w+\]( name:[^\n]*)?"
    r"|Error in user-defined function passed to \S+ transformation with iterator: \S+: "
    r"|Could not automatically infer .*?\bError encountered:\s*"  # added by Keras for a layer
    r"|Exception encountered when calling [\w.]+\(\)\.\s*| with name 'None'",
    re.DOTALL,
)
# TensorFlow and Keras append text to a message: a second message, or a hint that is useless without
# the traceback. These are the beginnings of the appended text.
_APPENDED = (
    "\n  (1) ",
    "Arguments received by ",
    " Hint: If you want to see",
    "You can attempt the following resolutions",
    "\n\nStack trace for op definition: ",
    "\nThe op is created at:",
    " Label values: ",
)
# Remedies for mistakes in graph hooks, by a pattern that matches the message of Python or
# TensorFlow. The message itself contains no remedy.
_CURES = {
    r"object has no attribute 'numpy'": (
        "a tensor in a graph has no value: use TensorFlow ops, or a host hook"
    ),
    r"parameter 't' has DataType complex": (  # raised by tf.nn.l2_loss
        "TensorFlow computes no norm of complex tensors: use ctl.clip_by_global_norm"
    ),
    r"label value of -?\d+ which is outside the valid range": (
        "the model needs one output per class, and labels start at 0"
    ),
}
# Explanations that replace a message of TensorFlow, by a pattern that matches the message.
_EXPLANATIONS = {
    r"`merge_call` called while defining a new graph": (
        "exchanges values between replicas inside a branch, a loop or a tf.function; exchange them "
        "before it, and use the result inside"
    ),
}


class StackFrame(Protocol):
    """A frame of the stack that created an operation, as TensorFlow records it."""

    filename: str
    lineno: int
    name: str


class GraphOp(Protocol):
    """An operation of a graph (``tf.Operation``; TensorFlow is not imported here)."""

    @property
    def traceback(self) -> Iterable[StackFrame] | None:
        """The stack that created the operation, outermost frame first."""


class CtlError(Exception):
    """Base of the engine's own errors; ``exit_code`` is the exit code of the command."""

    exit_code = 1


class SetupError(CtlError):
    """Wrong usage, settings or hooks, found before training starts (exit code 2)."""

    exit_code = 2


class RunError(CtlError):
    """A run has failed, for example because a file could not be written (exit code 1)."""


class PeerLost(RunError):
    """Another process of the cluster is gone (exit code 75: restarting all processes helps)."""

    exit_code = 75


class StopTraining(CtlError):
    """Ends training when a hook (``every_steps`` or ``at_step``) raises it.

    The run is evaluated and saved as after its last step, and the exit code is 0. Starting the run
    again only reports that it has ended, unless ``steps`` was raised or ``--continue`` is passed.
    """


class RefusedCall(ValueError):
    """A hook, a layer or a loss makes a call that the engine rejects.

    The code that rejects the call does not know which hook is running. The code that called the
    hook adds the hook's name and line to the message. A ``CtlError`` would not get a line there.
    """


class HookFailed(RunError):
    """A hook raised an error. The message names the hook, its file and line, and the error."""


class CompilationFailed(RunError):
    """XLA cannot compile a later graph of a compiled run, for example after a layer is unfrozen."""


class NotCompilable(RefusedCall):
    """A hook does something that cannot be part of an XLA executable, such as a summary.

    The exception is raised within the hook, so that ``HookFailed`` names the hook and the line.
    """


class NotShareable(RefusedCall):
    """A function cannot be shared by all devices, for example because replicas exchange values.

    It is then traced for each device.
    """


def make_line(text: object, limit: int = 400) -> str:
    """Converts a value to one line of at most ``limit`` characters, without escape sequences."""
    line = " ".join(_ESCAPES.sub("", str(text)).split())
    if len(line) > limit:
        line = line[: limit - 1] + "…"
    return line


def quote(value: object, limit: int = 80) -> str:
    """Returns the ``repr`` of a value in one line of at most ``limit`` characters."""
    return make_line(repr(value), limit)


def format_name(text: object) -> str:
    """Returns a path or a name in one line, without quotes, for a message."""
    return make_line(repr(str(text))[1:-1], 200)


def suggest(name: str, names: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the most similar of ``names``, or an empty string."""
    names = list(names)
    similar = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.5)
    if len(name) > 2:
        similar += [candidate for candidate in names if name in candidate]
    if not similar:
        return ""
    return f"; did you mean '{similar[0]}'?"


def format_error(error: BaseException, limit: int = 300) -> str:
    """Returns an error in one line, in the form ``ValueError: the message``.

    TensorFlow and Keras add stacks, node names and the arguments of a layer's call to a message.
    These additions are removed, because the traceback contains them as well. Exceptions have no
    attributes for the additions, so they are found with regular expressions. If TensorFlow changes
    the form of an addition, the line only becomes longer.

    For a ``RefusedCall``, only the message is returned.
    """
    kind = type(error).__name__
    text = _ESCAPES.sub("", str(error))
    for pattern, explanation in _EXPLANATIONS.items():
        if re.search(pattern, text):
            return explanation
    if text.startswith("in user code:"):  # tf.data puts the stack before the message
        text = text.rpartition(f"    {kind}: ")[2]
    text, stack, _ = _PLACES.sub("", text).partition("Traceback (most recent call last):")
    # The original exception was raised by Python code inside an op, such as tf.py_function.
    if stack and re.match(r"\w+: ", text.lstrip()):
        kind, _, text = text.lstrip().partition(": ")
    for end in _APPENDED:
        text = text.split(end)[0]
    text = make_line(re.sub(r"\{\{node ([^}]*)\}\}", r"\1", text), limit)
    if not text:
        return kind
    for mistake, cure in _CURES.items():
        if re.search(mistake, text):
            text = f"{text.rstrip('.')}; {cure}"
    if isinstance(error, RefusedCall):
        return text
    return f"{kind}: {text}"


ENGINE = str(Path(__file__).parents[1])
# A source file is not the user's if its path contains one of these strings.
NOT_THE_USERS = (
    ENGINE,
    sysconfig.get_paths()["stdlib"],
    "site-packages",
    "dist-packages",
    "__autograph_generated",
)


def find_code(function: Callable[..., Any]) -> types.CodeType | None:
    """Returns the code object that a callable runs, or None if the code is not written in Python.

    Args:
        function: a function, a partial, an object with ``__call__``, or a class. For a class, the
            code of its first method is returned.
    """
    function = inspect.unwrap(getattr(function, "func", function))
    candidates = [function]
    if inspect.isclass(function):
        candidates += vars(function).values()
    else:
        candidates.append(type(function).__call__)
    for candidate in candidates:
        code: types.CodeType | None = getattr(candidate, "__code__", None)
        if code is not None:
            return code
    return None


def locate(function: Callable[..., Any]) -> str:
    """Returns where a function is defined: a line such as ``callbacks.py:12``, or the module."""
    code = find_code(function)
    if code is None:
        return getattr(function, "__module__", None) or "callbacks"
    if getattr(function, "__module__", None) == "ctl_core.hooks.defaults":
        return "the engine's default"
    return f"{format_file_name(code.co_filename)}:{code.co_firstlineno}"


def format_file_name(path: str) -> str:
    """Returns the name of a source file for a message, such as ``callbacks.py`` or ``cell 3``.

    Args:
        path: the file name in a code object; for a cell of a notebook, no such file exists
    """
    number = _find_cell_number(path)
    if number is not None:
        return f"cell {number}"
    if "ipykernel" in path:
        return "cell"
    return Path(path).name


def _find_cell_number(path: str) -> str | None:
    """Returns the number of the notebook cell that a file name refers to, or None."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if get_shell is None:
        return None
    format_code_name = getattr(getattr(get_shell(), "compile", None), "format_code_name", None)
    if format_code_name is None:
        return None
    number = re.search(r"\d+", " ".join(format_code_name(path) or ()))
    if number is None:
        return None
    return number[0]


def find_users_line() -> str:
    """Returns the innermost running line of the user's code, such as ``callbacks.py:14``."""
    for frame in reversed(traceback.extract_stack()):
        if not any(name in frame.filename for name in NOT_THE_USERS):
            return f"{format_file_name(frame.filename)}:{frame.lineno}"
    return "callbacks"


def read_frames(op: GraphOp) -> list[tuple[str, int]]:
    """Returns the stack that created an op, as pairs (file, line), outermost frame first."""
    return [(frame.filename, frame.lineno) for frame in op.traceback or ()]


def read_calls(op: GraphOp) -> list[tuple[str, int, str]]:
    """Returns the stack that created an op, as (file, line, function), outermost frame first."""
    return [(frame.filename, frame.lineno, frame.name) for frame in op.traceback or ()]


def parse_frames(text: str) -> list[tuple[str, int]]:
    """Finds a stack in a message; returns its frames as pairs (file, line), outermost first."""
    frames = re.findall(r'^\s*File "([^"\n]+)", line (\d+), in ', text, re.MULTILINE)
    return [(filename, int(line)) for filename, line in frames]
