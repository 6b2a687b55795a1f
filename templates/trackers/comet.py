"""Logs runs to Comet; ``listener`` in config.yaml names it. It is yours to change.

``comet login`` once; with COMET_START_ONLINE=0, the end of a run writes an archive into its folder,
for ``comet upload``. A run that is stopped or killed, and goes on, does so under the same key.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import ctl_core

os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "false")  # its own, of this machine

import comet_ml

PROJECT = Path(__file__).resolve().parent.name
# Of a run, its settings and its values are sent: nothing of the environment or the command line.
OFF: dict[str, Any] = {
    "auto_log_co2": False,
    "auto_metric_logging": False,
    "auto_output_logging": False,
    "auto_param_logging": False,
    "display_summary_level": 0,
    "log_code": False,
    "log_env_details": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "log_graph": False,
    "parse_args": False,
}


class Tracker(ctl_core.Listener):
    """An experiment there for each run here."""

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        file = folder / "tracker_id"
        if not file.exists():
            file.write_text(uuid.uuid4().hex)
        options = comet_ml.ExperimentConfig(name=folder.name, offline_directory=str(folder), **OFF)
        self.experiment = comet_ml.start(
            project_name=PROJECT,
            experiment_key=file.read_text(),
            mode="get_or_create",
            experiment_config=options,
        )
        self.experiment.log_parameters(config)

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        named = {f"{split}/{name}": value for name, value in values.items()}
        self.experiment.log_metrics(named, step=step)

    def end(self, step: int, how: str) -> None:
        self.experiment.log_other("how", how)
        self.experiment.end()
