"""Where and with what a run is trained, for whoever looks at it later: env.json."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ctl_core import __version__

_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "numpy")


def find_provenance(devices: Sequence[str]) -> dict[str, Any]:
    """Returns versions, commit, host, devices and command line.

    Args:
        devices: that the replicas of this process train on

    Returns:
        ``commit`` is that of the current folder's Git repository and ``dirty`` whether files differ
        from it; both are None where there is none, or where Git takes too long.
    """
    versions = {"python": platform.python_version(), "ctl_core": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    revision, dirty = read_commit()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "host": platform.node(),
        "system": platform.platform(),
        "devices": list(devices),
        "versions": versions,
        "commit": revision,
        "dirty": dirty,
    }


def read_commit() -> tuple[str | None, bool | None]:
    """Returns the commit of the current folder, and whether files differ from it, or None."""
    name = _git("rev-parse", "HEAD")
    changes = None if name is None else _git("status", "--porcelain", "--untracked-files=no")
    return name, None if changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
