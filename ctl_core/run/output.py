"""Standard output and error that may go away while a run trains.

``./train.sh | head -1`` ends the reader of the output, and the disk under a file may be full.
Neither may end a training of days, whose log has every line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any, TextIO


class DroppableOutput:
    """A text stream that is dropped once it cannot be written; whoever writes notices nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, if that is possible."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Flushes what was written, if that is possible."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Sends everything that this process still writes there, C++ included, to nowhere."""
        number = self._stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
        with contextlib.suppress(OSError):
            self._stream.flush()  # what is still in its buffer
        logging.getLogger("ctl_core").warning(
            "%s cannot be written to (%s); only this log goes on",
            self._stream.name.strip("<>"),
            error.strerror,
        )


def keep_outputs() -> None:
    """Makes this process go on when its outputs are closed, or closed when it starts.

    Files that are opened would otherwise get the numbers of the outputs, and C++ would write its
    messages into them.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    sys.stdout = _wrap(sys.stdout, 1)
    sys.stderr = _wrap(sys.stderr, 2)


def _wrap(stream: TextIO | None, number: int) -> Any:
    """Returns a stream that may be dropped; Python has None for one that was closed."""
    if stream is None:
        stream = os.fdopen(number, "w", closefd=False)
    return DroppableOutput(stream)
