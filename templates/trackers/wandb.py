"""Logs runs to Weights & Biases; ``listener`` in config.yaml names it. It is yours to change.

``wandb login`` once; with WANDB_MODE=offline everything stays in the run's folder, and ``wandb
sync`` uploads it. A run that is stopped or killed, and goes on, does so under the same id.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import ctl_core

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own, of this machine

import wandb

PROJECT = Path(__file__).resolve().parent.name
# Of a run, its settings and its values are sent: nothing of the environment or the command line.
SETTINGS = wandb.Settings(
    console="off",
    disable_code=True,
    disable_git=True,
    x_disable_machine_info=True,
    x_disable_meta=True,
    x_disable_stats=True,
    x_save_requirements=False,
)


class Tracker(ctl_core.Listener):
    """A run there for each run here."""

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        file = folder / "tracker_id"
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:8])
        self.run = wandb.init(
            project=PROJECT,
            id=file.read_text(),
            name=folder.name,
            config=config,
            dir=folder,
            resume="allow",
            settings=SETTINGS,
        )

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        # It takes nothing of steps below its last one: after a kill, those that come again.
        self.run.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def end(self, step: int, how: str) -> None:
        self.run.summary["how"] = how
        self.run.finish(exit_code=int(how in ("diverged", "failed")))
