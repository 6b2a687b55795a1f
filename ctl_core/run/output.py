"""Lets a run continue when its standard output or standard error can no longer be written.

In ``./train.sh | head -1``, the reader of the output ends, and if the output is a file, its disk
may become full. Neither should end a training run of several days; all lines are still in the log
of the run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class DroppableOutput:
    """A text stream that discards all text once writing fails, without raising an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a string, or discards it if writing fails."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, or discards its content if flushing fails."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Discards all further output to the stream, including the output of C++ code."""
        number = self._stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
        with contextlib.suppress(OSError):
            self._stream.flush()  # discards the text that is still in its buffer
        logging.getLogger("ctl_core").warning(
            "%s cannot be written to (%s); from now on, only this log is written",
            self._stream.name.strip("<>"),
            error.strerror,
        )


def escape_missing_letters(stream: object) -> None:
    """Makes a stream write escapes, such as ``\\xfc``, for characters that its encoding lacks.

    Otherwise, such a character would end the run with an error.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


def restore_letters(text: str) -> str:
    """Decodes a word of the command line as UTF-8, even if Python has decoded it differently.

    Python decodes the command line in the encoding of the locale, which may be ASCII.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def keep_outputs() -> None:
    """Lets this process continue when its outputs are closed, now or later.

    If an output is closed when the process starts, it is replaced by the null device. Otherwise,
    the next file that is opened would get its file descriptor, and C++ code would write its
    messages into that file.
    """
    for stream in (sys.stdout, sys.stderr):
        escape_missing_letters(stream)
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is ``number``
    sys.stdout = _wrap(sys.stdout, 1)
    sys.stderr = _wrap(sys.stderr, 2)


def _wrap(stream: TextIO | None, number: int) -> Any:
    """Returns a ``DroppableOutput``; ``stream`` is None if it was closed when Python started."""
    if stream is None:
        stream = os.fdopen(number, "w", closefd=False)
    return DroppableOutput(stream)


@contextlib.contextmanager
def silence_stderr(is_silent: bool = True) -> Iterator[None]:
    """Drops what this process writes to its standard error, including the output of C++ code.

    Args:
        is_silent: whether to do so; if False, the context changes nothing
    """
    stderr = os.dup(2)
    if is_silent:
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
