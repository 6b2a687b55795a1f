"""Collects the versions, packages, devices and Git commit with which a run is trained."""

import contextlib
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core import __version__

# Tools that every virtual environment contains. They are not listed, because installing other
# versions of these tools could break an environment.
_INSTALLERS = ("pip", "setuptools", "wheel")


def find_provenance(devices: Sequence[str], compilation: str) -> dict[str, Any]:
    """Returns the content of env.json.

    The values of ``commit`` and ``dirty`` are None if the project is not in a Git repository.

    Args:
        devices: the devices of this process's replicas
        compilation: a phrase that says whether steps are compiled, or why they are not
    """
    changes = _run_git("status", "--porcelain", "--untracked-files=no")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "host": platform.node(),
        "system": platform.platform(),
        "devices": list(devices),
        "compilation": compilation,
        "versions": {
            "python": platform.python_version(),
            "ctl_core": __version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
        "commit": _run_git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def list_packages() -> str:
    """Returns the installed packages, one per line, in the format of ``pip install -r``.

    Packages that were installed from a folder or a URL are not listed, because their version does
    not identify them. pip, setuptools and wheel are not listed, either, because they belong to the
    environment.
    """
    requirements = set()
    for folder in sys.path:
        if not folder.endswith("-packages"):
            continue
        for metadata in Path(folder).glob("*.dist-info"):
            name, _, version = metadata.stem.partition("-")
            if name not in _INSTALLERS and not (metadata / "direct_url.json").exists():
                requirements.add(f"{name}=={version}")
    return "\n".join([f"# Python {platform.python_version()}", *sorted(requirements), ""])


def _run_git(*arguments: str) -> str | None:
    """Returns the output of a Git command, or None if the command fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.check_output(
            ["git", *arguments], text=True, timeout=3, stderr=subprocess.DEVNULL
        )
        return output.strip()
    return None
