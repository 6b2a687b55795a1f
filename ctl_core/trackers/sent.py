"""What of a run a tracker has got: trackers/NAME.json in the run folder.

metrics.jsonl is the truth. A run that goes on from a checkpoint takes some of its steps again; what
was sent of them is not sent twice. Where settings or hooks have changed in between, they are other
steps, and the run begins anew there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ctl_core.callbacks_file import COPY
from ctl_core.files import written_whole

# Settings of where and how long a run is trained, which change none of its values.
_OF_PLACE = (
    "run_name",
    "runs_dir",
    "debug",
    "trackers",
    "workers",
    "strategy",
    "cluster",
    "wait_for_workers",
    "virtual_devices",
    "gpu_memory_limit",
    "max_restarts",
    "max_time",
    "profile",
    "ckpt_every",
    "keep_best",
    "steps_per_call",
    "callbacks",
)


@dataclasses.dataclass
class Sent:
    """How far a tracker has come.

    Attributes:
        id: with which it goes on, or None
        project: in which it began
        fingerprint: of settings and hooks, when it was last started
        lines: of metrics.jsonl, how many were done
        digest: of these
        high, at: the highest step that was sent, and how many lines of it
        pictures: by name, the highest step of a picture that was sent
        closed: whether the tracker has finished since it was last started
    """

    id: str | None = None
    project: str = ""
    fingerprint: str = ""
    lines: int = 0
    digest: str = hashlib.sha256().hexdigest()
    high: int = -1
    at: int = 0
    pictures: dict[str, int] = dataclasses.field(default_factory=dict)
    closed: bool = False

    @classmethod
    def read(cls, path: Path) -> Sent:
        """Reads what was written; nothing was sent where there is nothing that can be read."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        return cls()

    def write(self, path: Path) -> None:
        """Writes it, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        with written_whole(path) as beside:
            beside.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")


def fingerprint(folder: Path, settings: dict[str, Any]) -> str:
    """Returns a digest of what a run's values depend on: its settings and hooks."""
    left_out = {*_OF_PLACE}
    if settings.get("lr_schedule") == "constant":
        left_out |= {"steps", "epochs"}
    kept = {name: value for name, value in settings.items() if name not in left_out}
    found = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    with contextlib.suppress(OSError):
        found.update((folder / COPY).read_bytes())
    return found.hexdigest()


class Left:
    """Which lines of metrics.jsonl are left to send, as they come."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._number, self._digest = 0, hashlib.sha256()
        self._skipping = False
        self._at_high = 0

    def begin(self, lines: Sequence[str]) -> bool:
        """Finds out where to go on; returns whether steps are about to be taken again.

        Args:
            lines: that are there when the run is started
        """
        sent = self._sent
        self._skipping = len(lines) < sent.lines or _digest(lines[: sent.lines]) != sent.digest
        if not self._skipping:
            self._take(lines[: sent.lines])
        return self._skipping

    @property
    def number(self) -> int:
        """How many lines were gone through."""
        return self._number

    def is_new(self, line: str, step: int) -> bool:
        """Goes on by one line; returns whether it is to be sent.

        Call ``was_sent`` after that.
        """
        self._take([line])
        if not self._skipping:
            return True
        if step == self._sent.high:
            self._at_high += 1
        self._skipping = step < self._sent.high or (
            step == self._sent.high and self._at_high <= self._sent.at
        )
        return not self._skipping

    def was_sent(self, step: int) -> None:
        """Counts the last line as sent."""
        sent = self._sent
        sent.lines, sent.digest = self._number, self._digest.hexdigest()
        if step > sent.high:
            sent.high, sent.at = step, 0
        sent.at += step == sent.high

    def _take(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._number += 1
            self._digest.update(line.encode() + b"\n")


def _digest(lines: Iterable[str]) -> str:
    found = hashlib.sha256()
    for line in lines:
        found.update(line.encode() + b"\n")
    return found.hexdigest()
