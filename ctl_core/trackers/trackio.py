"""Trackio: a SQLite file here (``TRACKIO_DIR``), or the Space or server that its variables name."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from typing import Any

import trackio

from ctl_core.errors import brief
from ctl_core.trackers.base import Refused, Status, Tracked, denied, flat_env, named


class Tracker:
    """A run of Trackio."""

    where = ""

    def start(self, config: Mapping[str, Any], run: Tracked) -> str:
        """Begins a run, or goes on with the one of that name."""
        project = os.environ.get("TRACKIO_PROJECT") or run.project
        name = run.id or run.name
        if run.id is None and name in _names(project):
            name = f"{run.name}-{uuid.uuid4().hex[:4]}"
        try:
            self._run: Any = trackio.init(
                project=project,
                name=name,
                config={**config, "env": flat_env(run), "note": run.note},
                resume="allow",
                embed=False,
            )
        except Exception as error:
            if not isinstance(error, ValueError) and not denied(error):
                raise
            raise Refused(f"trackio: {brief(error, 160).partition(': ')[2]}") from error
        self.where = f'trackio show --project "{project}" shows it'
        return name

    def log(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Logs values of a step."""
        self._run.log(named(split, values), step=step)

    def image(self, step: int, name: str, png: bytes) -> None:
        """Logs a picture."""
        from PIL import Image

        self._run.log({name: trackio.Image(Image.open(io.BytesIO(png)))}, step=step)

    def finish(self, status: Status) -> None:
        """Ends the run."""
        if status.metrics:
            final = {f"final/{name}": value for name, value in status.metrics.items()}
            self._run.log(final, step=status.step)
        self._run.finish()


def _names(project: str) -> list[str]:
    """Returns the names of the runs of a project, which may not be there yet."""
    try:
        return [run.name for run in trackio.Api().runs(project)]
    except ValueError:
        return []
