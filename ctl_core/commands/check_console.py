"""The console of ``train --check``."""

from __future__ import annotations

from typing import Any

from ctl_core.run.console import LOG, Console


class CheckConsole(Console):
    """Prints what was checked, and warnings; the lines of the run itself go to its log."""

    def say(self, text: str) -> None:
        """Writes a line of the run to its log."""
        LOG.info(text)

    def start(self, *_: Any, **__: Any) -> None:
        """Shows no progress line."""

    def print(self, text: str) -> None:
        """Prints a line."""
        super().say(text)
