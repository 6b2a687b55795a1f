"""Processes of the engine's own beside a training, which Ctrl-C does not reach.

Nor does the end of the terminal; and nothing that they import, patch or raise reaches the training.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ctl_core


def start_apart(
    module: str, *words: str, environ: Mapping[str, str] | None = None, **pipes: Any
) -> subprocess.Popen[str]:
    """Starts a module of the engine as a process that finds the modules that this one does.

    Args:
        module: its dotted name
        words: its arguments
        environ: variables that are otherwise than here
        pipes: ``stdin``, ``stdout`` and ``stderr``, as subprocess.Popen has them

    Raises:
        OSError: it cannot be started.
    """
    path = [str(Path(ctl_core.__file__).parents[1]), *filter(None, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **(environ or {}), "PYTHONPATH": os.pathsep.join(path)},
        start_new_session=True,
        **pipes,
    )
