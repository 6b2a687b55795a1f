"""Weights & Biases. ``WANDB_MODE=offline`` needs no login; the files are in the run's ``trackers``.

``WANDB_PROJECT``, ``WANDB_ENTITY``, ``WANDB_DIR`` and others of its own are heeded.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from ctl_core.errors import brief
from ctl_core.files import from_here
from ctl_core.trackers.base import WELL, Refused, Status, Tracked, denied, flat_env, named


class Tracker:
    """A run of Weights & Biases.

    Its own process writes and uploads: where that is killed, too, what it had not written is gone.
    What was sent since the last proper end is sent again then; of steps that the server has, it
    takes nothing, and what was left of the files here is put aside.
    """

    where = ""
    safe = False

    def start(self, config: Mapping[str, Any], run: Tracked) -> str:
        """Begins a run, or goes on with it; offline, a further folder is written of the same id."""
        self._step, self._late = -1, 0
        self._pictures: list[tuple[int, str, bytes]] = []
        name = run.id or uuid.uuid4().hex[:8]
        folder = Path(os.environ.get("WANDB_DIR") or run.files)
        if not run.finished:
            for left in sorted(folder.glob(f"wandb/offline-run-*-{name}*"))[-1:]:
                left.rename(left.with_name(left.name.replace("offline-run", "unfinished", 1)))
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or run.project,
                id=name,
                name=run.name,
                notes=run.note or None,
                dir=str(folder),
                config={**config, "env": flat_env(run)},
                resume="allow",
                settings=wandb.Settings(console="off", silent=True, disable_code=True),
            )
        except wandb.errors.Error as error:
            known = isinstance(error, wandb.errors.UsageError | wandb.errors.AuthenticationError)
            if not known and not denied(error):
                raise
            why = brief(error, 160).partition(": ")[2]
            raise Refused(
                f"wandb: {why} (wandb login, or WANDB_MODE=offline for files here)"
            ) from error
        if self._run.offline:
            written = from_here(self._run.settings.sync_dir)
            self.where = f"offline, in {written}; wandb sync {written} uploads it"
        else:
            self.where = str(self._run.url)
        return name

    def log(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Logs values of a step; it takes none of a step below the last one."""
        if step < self._step:
            self._late += 1
            return
        self._log_pictures(step)
        self._step = step
        self._run.log(named(split, values), step=step)

    @property
    def missed(self) -> str:
        """Says what it does not have."""
        if not self._late:
            return ""
        return (
            f"{self._late} lines of metrics.jsonl have steps below that of a line before, and "
            "Weights & Biases takes none of these."
        )

    def image(self, step: int, name: str, png: bytes) -> None:
        """Keeps a picture until the values of its step are there, which may come later."""
        self._pictures.append((step, name, png))

    def _log_pictures(self, step: int | None = None) -> None:
        """Logs the pictures of steps up to one, or all; those that are late with the last step."""
        from PIL import Image

        self._pictures.sort(key=lambda picture: picture[0])
        while self._pictures and (step is None or self._pictures[0][0] <= step):
            own, name, png = self._pictures.pop(0)
            self._step = max(own, self._step)
            picture = wandb.Image(Image.open(io.BytesIO(png)), caption=f"step {own}")
            self._run.log({name: picture}, step=self._step)

    def finish(self, status: Status) -> None:
        """Ends the run, as failed unless it has come to its end or was stopped."""
        self._log_pictures()
        self._run.summary.update(
            {"how": status.how, "said": status.line}
            | {f"final/{name}": value for name, value in status.metrics.items()}
        )
        self._run.finish(exit_code=0 if status.how in (*WELL, "stopped") else 1)
