"""Standard output and standard error that outlive who reads them.

A training goes on without its reader: ``head`` and a pager end when they have seen enough, a
terminal is closed, a disk is full. What it says is in its log as well.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Any

LOG = logging.getLogger("ctl_core")


class _Lasting(io.FileIO):
    """A file descriptor that leads nowhere once it cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for what C++ and children print, too
            os.close(nowhere)
            LOG.warning(
                "%s cannot be written any more (%s); the process goes on, and its log has what it "
                "says.",
                {1: "standard output", 2: "standard error"}.get(self.fileno(), "a stream"),
                os.strerror(error.errno or 0),
            )
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Lets this process go on when nobody takes what it prints; from here on, to its end."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper:  # a test's, or an embedding program's
            continue
        try:
            stream.flush()
            raw = _Lasting(stream.fileno(), "w", closefd=False)
        except (OSError, ValueError):  # closed
            continue
        lasting = io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),  # as PYTHONUNBUFFERED has it
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)
