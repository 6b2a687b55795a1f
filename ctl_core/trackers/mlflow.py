"""MLflow: the server of ``MLFLOW_TRACKING_URI``, or a SQLite file beside the runs without one."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Its own patience with a server is a quarter of an hour a call.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import sqlalchemy  # noqa: F401  needed for its files; said here that it is missing
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException

from ctl_core.errors import brief
from ctl_core.files import alone_in, from_here
from ctl_core.layers import flat
from ctl_core.trackers.base import WELL, Refused, Status, Tracked, denied, flat_env, named

# What one call may hold, by MLflow's own limits.
_PARAMS, _METRICS, _LENGTH = 100, 1000, 5000


class Tracker:
    """A run of MLflow."""

    where = ""

    def start(self, config: Mapping[str, Any], run: Tracked) -> str:
        """Begins a run, or goes on with it.

        What a run was begun with cannot be changed there: a setting with which it goes on
        otherwise becomes a tag, such as ``learning_rate@300``.
        """
        self._metrics: list[Metric] = []
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        here = run.folder.parent / "mlflow.db"
        try:
            with alone_in(run.folder.parent):  # of several runs, one makes the file
                self._client = MlflowClient(uri or f"sqlite:///{here}")
                self._run = run.id or self._create(run, uri)
            self._client.update_run(self._run, status="RUNNING")
            self._describe(config, run)
        except MlflowException as error:
            if error.get_http_status_code() in (401, 403) or denied(error):
                raise Refused(
                    f"mlflow: {brief(error, 160).partition(': ')[2]} (MLFLOW_TRACKING_USERNAME and "
                    "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN)"
                ) from error
            raise
        self.where = uri or (
            f"in {from_here(here)}; mlflow ui --backend-store-uri sqlite:///{from_here(here)} "
            "shows it (pip install mlflow)"
        )
        return self._run

    def _create(self, run: Tracked, uri: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        found = self._client.get_experiment_by_name(name)
        if found is None:
            files = None if uri else (run.folder.parent / "mlflow-files").as_uri()
            experiment = self._client.create_experiment(name, artifact_location=files)
        else:
            experiment = found.experiment_id
        return str(self._client.create_run(experiment, run_name=run.name).info.run_id)

    def _describe(self, config: Mapping[str, Any], run: Tracked) -> None:
        """Logs settings, note, commit and where the run is trained."""
        settings = {_name(key): str(x)[:_LENGTH] for key, x in flat(config).items()}
        there = self._client.get_run(self._run).data.params
        new = [Param(key, x) for key, x in settings.items() if key not in there]
        for first in range(0, len(new), _PARAMS):
            self._client.log_batch(self._run, params=new[first : first + _PARAMS])
        env = flat_env(run)
        tags = {f"env.{_name(key)}": x for key, x in env.items()}
        tags |= {f"{key}@{run.step}": x for key, x in settings.items() if there.get(key, x) != x}
        if run.note:
            tags["mlflow.note.content"] = run.note
        if "commit" in env:
            tags["mlflow.source.git.commit"] = env["commit"]
        self._tag(tags)

    def _tag(self, tags: Mapping[str, Any]) -> None:
        found = [RunTag(key, str(x)[:_LENGTH]) for key, x in tags.items()]
        for first in range(0, len(found), _PARAMS):
            self._client.log_batch(self._run, tags=found[first : first + _PARAMS])

    def log(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Keeps values of a step for the next ``flush``."""
        now = int(time.time() * 1000)
        self._metrics += [
            Metric(_name(key), x, now, step) for key, x in named(split, values).items()
        ]

    def flush(self) -> None:
        """Logs the values, which takes milliseconds a call."""
        while self._metrics:
            self._client.log_batch(self._run, metrics=self._metrics[:_METRICS])
            del self._metrics[:_METRICS]

    def image(self, step: int, name: str, png: bytes) -> None:
        """Logs a picture as the file pictures/NAME/STEP.png."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{step:08d}.png")
            path.write_bytes(png)
            self._client.log_artifact(self._run, str(path), f"pictures/{_name(name)}")

    def finish(self, status: Status) -> None:
        """Ends the run."""
        self.flush()
        now = int(time.time() * 1000)
        final = [
            Metric(_name(f"final/{key}"), x, now, status.step) for key, x in status.metrics.items()
        ]
        self._client.log_batch(self._run, metrics=final)
        self._tag({"how": status.how} | ({"said": status.line} if status.line else {}))
        ended = {"stopped": "KILLED", "killed": "KILLED"}.get(status.how, "FAILED")
        ended = "FINISHED" if status.how in WELL else ended
        self._client.set_terminated(self._run, RunStatus.to_string(RunStatus.from_string(ended)))


def _name(text: str) -> str:
    """Returns a name with nothing in it that MLflow refuses."""
    return re.sub(r"[^\w.\-: /]", "_", text)[:250]
