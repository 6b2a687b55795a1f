"""``curves.png`` in the run folder: what a run has measured, drawn whenever a training ends.

Another process draws it, with matplotlib, so that training imports none of it and no failure of it
reaches the run. Where matplotlib is not installed nothing is drawn, which train.log alone says.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

from ctl_core.apart import start_apart
from ctl_core.console import LOG

CURVES = "curves.png"
PACKAGE = "matplotlib"
# How long a run waits for it at its end (seconds); one that takes longer goes on by itself.
PATIENCE = 10.0


class Still:
    """The process that draws the curves of one run."""

    def __init__(self, folder: Path) -> None:
        """Starts it, if it can draw.

        Args:
            folder: of the run, whose files are written
        """
        self._process: subprocess.Popen[str] | None = None
        if importlib.util.find_spec(PACKAGE) is None:
            LOG.info('%s is drawn where matplotlib is: pip install --editable ".[plot]"', CURVES)
            return
        try:
            self._process = start_apart(
                "ctl_core.tools.figure",
                str(folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            LOG.warning("%s is not drawn: %s", CURVES, error)

    def wait(self) -> None:
        """Waits for it; says in train.log what has gone wrong."""
        if self._process is None:
            return
        try:
            _, said = self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            LOG.warning("%s is still being drawn, by process %d", CURVES, self._process.pid)
            return
        if self._process.returncode:
            why = (said.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]
            LOG.warning("%s is not drawn: %s", CURVES, why)
