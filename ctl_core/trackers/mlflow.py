"""MLflow: the server of ``MLFLOW_TRACKING_URI``, or a SQLite file beside the runs without one."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Its own patience with a server is a quarter of an hour a call.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import sqlalchemy  # noqa: F401  needed for its files; said here that it is missing
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException

from ctl_core.errors import brief, one_line
from ctl_core.files import alone_in, from_here
from ctl_core.layers import flat
from ctl_core.trackers.base import WELL, Refused, Status, Tracked, denied, flat_env, named

# What one call may hold, by MLflow's own limits.
_PARAMS, _METRICS, _LENGTH, _NAME = 100, 1000, 5000, 250


class Tracker:
    """A run of MLflow."""

    where = ""

    def __init__(self) -> None:
        self._name = Names()
        self._refused, self._why = 0, ""

    def start(self, config: Mapping[str, Any], run: Tracked) -> str:
        """Begins a run, or goes on with it.

        What a run was begun with cannot be changed there: a setting with which it goes on
        otherwise becomes a tag, such as ``learning_rate at 300``.
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
        settings = {self._name(key): str(x)[:_LENGTH] for key, x in flat(config).items()}
        there = self._client.get_run(self._run).data
        new = [Param(key, x) for key, x in settings.items() if key not in there.params]
        self._log("params", new)
        env = flat_env(run)
        tags = {f"env.{key}": x for key, x in env.items()}
        for key, x in settings.items():
            if key in there.params and _last(key, there) != x:
                tags[f"{key} at {run.step}"] = x
        if run.note:
            tags["mlflow.note.content"] = run.note
        if "commit" in env:
            tags["mlflow.source.git.commit"] = env["commit"]
        self._tag(tags)

    def _tag(self, tags: Mapping[str, Any]) -> None:
        self._log("tags", [RunTag(self._name(key), str(x)[:_LENGTH]) for key, x in tags.items()])

    def _log(self, kind: str, values: Sequence[Any]) -> None:
        """Logs params, metrics or tags, many a call; one that MLflow refuses keeps none back."""
        most = _METRICS if kind == "metrics" else _PARAMS
        for first in range(0, len(values), most):
            some = values[first : first + most]
            if len(some) == 1 or not self._taken(self._log_some, kind, some):
                for one in some:
                    if not self._taken(self._log_some, kind, [one]):
                        self._refused += 1

    def _log_some(self, kind: str, values: Sequence[Any]) -> None:
        self._client.log_batch(self._run, **{kind: values})

    def _taken(self, action: Callable[..., Any], *words: Any) -> bool:
        """Does something; returns whether MLflow takes what it was given."""
        try:
            action(*words)
        except MlflowException as error:
            if error.get_http_status_code() != 400:
                raise
            self._client.update_run(self._run, status="RUNNING")  # raises if it is the run itself
            self._why = self._why or one_line(error, 160)
            return False
        return True

    @property
    def missed(self) -> str:
        """Says what MLflow has refused."""
        if not self._refused:
            return ""
        return f"{self._refused} of the values and pictures are refused there: {self._why}"

    def log(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Keeps values of a step for the next ``flush``."""
        now = int(time.time() * 1000)
        self._metrics += [
            Metric(self._name(key), x, now, step) for key, x in named(split, values).items()
        ]

    def flush(self) -> None:
        """Logs the values, which takes milliseconds a call."""
        while self._metrics:
            self._log("metrics", self._metrics[:_METRICS])
            del self._metrics[:_METRICS]

    def image(self, step: int, name: str, png: bytes) -> None:
        """Logs a picture as the file pictures/NAME/STEP.png."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{step:08d}.png")
            path.write_bytes(png)
            where = self._name(f"pictures/{name}")
            self._refused += not self._taken(self._client.log_artifact, self._run, str(path), where)

    def finish(self, status: Status) -> None:
        """Ends the run."""
        self.flush()
        now = int(time.time() * 1000)
        final = [
            Metric(self._name(f"final/{key}"), x, now, status.step)
            for key, x in status.metrics.items()
        ]
        self._log("metrics", final)
        self._tag({"how": status.how} | ({"said": status.line} if status.line else {}))
        ended = {"stopped": "KILLED", "killed": "KILLED"}.get(status.how, "FAILED")
        ended = "FINISHED" if status.how in WELL else ended
        self._client.set_terminated(self._run, RunStatus.to_string(RunStatus.from_string(ended)))


def _last(key: str, there: Any) -> str:
    """Returns the setting that a run had when it was last begun or went on."""
    found = [(0, there.params[key])]
    for name, value in there.tags.items():
        step = name.removeprefix(f"{key} at ")
        if step != name and step.isdecimal():
            found.append((int(step), value))
    return str(max(found, key=lambda one: one[0])[1])


class Names:
    """Names that MLflow takes, of such as it does not; what has two names here has two there.

    It takes letters, digits and ``_-. :/`` (on Windows without the colon), at most 250 of them, and
    nothing that would be another file where a name is one
    (https://mlflow.org/docs/latest/api_reference/python_api/mlflow.html#mlflow.log_metric).
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        """Returns the name of a text, the same each time."""
        colon = "" if os.name == "nt" else ":"
        name = re.sub(rf"[^\w.\- /{colon}]", "_", text)
        parts = [part if part.strip(".") else "_" * max(1, len(part)) for part in name.split("/")]
        name = "/".join(parts)
        name = name if len(name) <= _NAME else name[:_NAME].rstrip("/.")
        if self._texts.setdefault(name, text) != text:  # of another text already
            digest = hashlib.sha256(text.encode()).hexdigest()[:6]
            name = f"{name[: _NAME - 7].rstrip('/.')} {digest}"
        return name
