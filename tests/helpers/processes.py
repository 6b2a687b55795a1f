"""The trainings that run on this machine, by Linux's /proc."""

from __future__ import annotations

from pathlib import Path


def find_training(*marks: str) -> int:
    """Returns the number of a process that trains.

    Args:
        marks: words of its command line, and ``NAME=value`` of its environment
    """
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, environ = (
                (folder / name).read_bytes().decode(errors="replace").split("\0")
                for name in ("cmdline", "environ")
            )
        except OSError:  # it has ended meanwhile
            continue
        if "ctl_core" in words and {*marks} <= {*words, *environ}:
            return int(folder.name)
    raise AssertionError(f"no training of {marks}")
