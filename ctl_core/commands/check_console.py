"""The console of ``train --check``."""

from __future__ import annotations

from typing import Any

from ctl_core.run.console import LOG, Console


class CheckConsole(Console):
    """Prints the results of the check, and warnings. The lines of the rehearsed run are logged."""

    def say(self, text: str) -> None:
        """Writes a line of the rehearsed run to its log."""
        LOG.info(text)

    def start(self, *_: Any, **__: Any) -> None:
        """Does nothing, because a check has no progress line."""

    def print(self, text: str) -> None:
        """Prints a line about the check."""
        super().say(text)
