"""Logs runs to Trackio; ``listener`` in config.yaml names it. It is yours to change.

Everything stays on this machine, where ``trackio show`` shows it, unless TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL says otherwise. A run that is stopped or killed, and goes on, does so under the
same name.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import trackio

import ctl_core

PROJECT = Path(__file__).resolve().parent.name


class Tracker(ctl_core.Listener):
    """A run there for each run here."""

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        file = folder / "tracker_id"
        if not file.exists():
            file.write_text(f"{folder.name}-{uuid.uuid4().hex[:4]}")
        # Of a run, its settings and its values are sent, and the name of who is logged in there.
        self.run = trackio.init(
            project=PROJECT,
            name=file.read_text(),
            config=config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        self.run.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def end(self, step: int, how: str) -> None:
        self.run.finish()
