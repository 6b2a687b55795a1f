"""The two ways in which a run can end badly, each with its exit code.

Whatever the engine raises on purpose is one of these, with a message of one line: what, where,
what was expected, what to do. ``__main__`` prints the line; the traceback goes to train.log.
"""

from __future__ import annotations


class CtlError(Exception):
    """Base of the engine's own errors; ``exit_code`` is what the command returns."""

    exit_code = 1


class SetupError(CtlError):
    """Wrong usage, settings or hooks, found before training starts (exit code 2)."""

    exit_code = 2


class RunError(CtlError):
    """A failure while running: a hook raised, a file could not be written (exit code 1)."""


class HookFailed(RunError):
    """A hook raised. The message names the hook, its file and line, and the exception."""


def one_line(text: object, limit: int = 400) -> str:
    """Squeezes a message into one line of at most ``limit`` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
