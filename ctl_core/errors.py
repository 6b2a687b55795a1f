"""The ways in which a run can end badly, each with its exit code.

Whatever the engine raises on purpose is one of these, with a message of one line: what, where,
what was expected, what to do. ``__main__`` prints the line; the traceback goes to train.log.
"""

from __future__ import annotations

import re

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
    r"|Could not automatically infer .*?\bError encountered:\s*",  # of a layer, by Keras
    re.DOTALL,
)
# What follows a message: another one, and what only helps beside the traceback.
_APPENDED = (
    "\n  (1) ",
    "Arguments received by ",
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


def one_line(text: object, limit: int = 400) -> str:
    """Squeezes a message into one line of at most ``limit`` characters, without colours."""
    line = " ".join(_ESCAPES.sub("", str(text)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def brief(error: BaseException, limit: int = 300) -> str:
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
    text = one_line(re.sub(r"\{\{node ([^}]*)\}\}", r"\1", text), limit)
    return f"{kind}: {text}" if text else kind


def reason(error: Exception) -> str:
    """Says in a few words why a file could not be read or written."""
    return getattr(error, "strerror", None) or brief(error, 160)
