"""The trainings that run on this machine, by Linux's /proc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def trainings() -> Iterator[tuple[int, list[str], list[str]]]:
    """Yields the number, the command line and the environment (``NAME=value``) of each."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, environ = (
                (folder / name).read_bytes().decode(errors="replace").split("\0")
                for name in ("cmdline", "environ")
            )
        except OSError:  # it has ended meanwhile
            continue
        if "ctl_core" in words:
            yield int(folder.name), words, environ
