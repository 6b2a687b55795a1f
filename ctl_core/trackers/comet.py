"""Comet. ``COMET_START_ONLINE=0`` needs no login; the archives are in the run's ``trackers``.

An archive is written when the run is over, so that nothing of it is safe before.
"""

from __future__ import annotations

import io
import os
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comet_ml

from ctl_core.errors import brief
from ctl_core.files import from_here
from ctl_core.layers import flat
from ctl_core.trackers.base import Refused, Status, Tracked, denied, flat_env, named

_OFF = {
    "auto_output_logging": False,
    "auto_param_logging": False,
    "auto_metric_logging": False,
    "auto_log_co2": False,
    "log_code": False,
    "log_graph": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "parse_args": False,
}


class Tracker:
    """An experiment of Comet."""

    where = ""
    safe = True

    def start(self, config: Mapping[str, Any], run: Tracked) -> str:
        """Begins an experiment, or goes on with it; offline, by a further archive of its key."""
        key = run.id or uuid.uuid4().hex
        folder = os.environ.get("COMET_OFFLINE_DIRECTORY") or str(run.files / "comet")
        _remove_unfinished(Path(folder), key)
        try:
            self._experiment: Any = comet_ml.start(
                project_name=os.environ.get("COMET_PROJECT_NAME") or run.project,
                experiment_key=key,
                mode="get_or_create" if run.id else "create",
                experiment_config=comet_ml.ExperimentConfig(
                    **_OFF, display_summary_level=0, offline_directory=folder, name=run.name
                ),
            )
        except Exception as error:
            if not isinstance(error, ValueError) and not denied(error):
                raise
            why = brief(error, 160).partition(": ")[2]
            raise Refused(
                f"comet: {why} (comet login, or COMET_START_ONLINE=0 for files here)"
            ) from error
        if isinstance(self._experiment, comet_ml.OfflineExperiment):
            self.safe = False
            self.where = (
                f"offline; the end of the run writes {from_here(folder)}/{key}*.zip, which comet "
                "upload takes"
            )
        elif not self._experiment.alive:
            raise ConnectionError("Comet does not take the experiment; its log says why")
        else:
            self.where = str(self._experiment.url)
        self._experiment.log_parameters(flat(config))
        self._experiment.log_others({f"env.{name}": x for name, x in flat_env(run).items()})
        if run.note:
            self._experiment.log_other("note", run.note)
        return key

    def log(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Logs values of a step."""
        self._experiment.log_metrics(named(split, values), step=step)

    def image(self, step: int, name: str, png: bytes) -> None:
        """Logs a picture."""
        self._experiment.log_image(io.BytesIO(png), name=name, step=step)

    def finish(self, status: Status) -> None:
        """Ends the experiment."""
        self._experiment.log_others({"how": status.how, "said": status.line})
        self._experiment.log_others({f"final/{k}": x for k, x in status.metrics.items()})
        self._experiment.end()


def _remove_unfinished(folder: Path, key: str) -> None:
    """Removes what a process that was killed has left: an archive with nothing in it."""
    for path in folder.glob(f"{key}*.zip"):
        try:
            with zipfile.ZipFile(path) as archive:
                empty = not archive.namelist()
        except zipfile.BadZipFile:
            empty = True
        if empty:
            path.unlink()
