"""Logs runs to MLflow; ``listener`` in config.yaml names it. It is yours to change.

MLFLOW_TRACKING_URI names a server. Without one, all runs are in runs/mlflow.db, which ``mlflow ui
--backend-store-uri sqlite:///runs/mlflow.db`` shows (pip install mlflow). A run that is stopped or
killed, and goes on, does so under the same id.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import ctl_core

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# Its own patience with a server that is away is a quarter of an hour a call.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

from mlflow import MlflowClient
from mlflow.entities import Metric

PROJECT = Path(__file__).resolve().parent.name
STATUS = {"done": "FINISHED", "ended": "FINISHED", "stopped": "KILLED"}


class Tracker(ctl_core.Listener):
    """A run there for each run here."""

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        here = f"sqlite:///{folder.parent / 'mlflow.db'}"
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or here)
        file = folder / "tracker_id"
        if not file.exists():
            found = self.client.get_experiment_by_name(PROJECT)
            experiment = found.experiment_id if found else self.client.create_experiment(PROJECT)
            run = self.client.create_run(experiment, run_name=folder.name)
            hparams = {f"hparams.{name}": value for name, value in config.pop("hparams").items()}
            # Of a run, these settings and its values are sent. They cannot be changed later.
            for name, value in {**config, **hparams}.items():
                self.client.log_param(run.info.run_id, name, value)
            file.write_text(run.info.run_id)
        self.run = file.read_text()
        self.client.update_run(self.run, status="RUNNING")

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        # It takes letters, digits and _-. /: in names.
        names = {re.sub(r"[^\w.\-/ ]", "_", name): value for name, value in values.items()}
        metrics = [Metric(f"{split}/{name}", value, now, step) for name, value in names.items()]
        self.client.log_batch(self.run, metrics=metrics)

    def end(self, step: int, how: str) -> None:
        self.client.set_terminated(self.run, STATUS.get(how, "FAILED"))
