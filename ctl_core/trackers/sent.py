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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ctl_core.callbacks_file import COPY
from ctl_core.files import written_whole
from ctl_core.layers import OF_PLACE


class Mark(NamedTuple):
    """A place in metrics.jsonl: how many lines are before it, and their digest."""

    lines: int
    digest: str


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
        progress: the highest step of a line of progress.jsonl that was sent
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
    progress: int = -1
    pictures: dict[str, int] = dataclasses.field(default_factory=dict)
    closed: bool = False

    @classmethod
    def read(cls, path: Path) -> Sent:
        """Reads what was written; nothing was sent where there is nothing that can be read."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        return cls()

    def add(self, step: int, mark: Mark) -> None:
        """Counts a line as sent: its step, and the place behind it."""
        self.lines, self.digest = mark
        if step > self.high:
            self.high, self.at = step, 0
        self.at += step == self.high

    def write(self, path: Path) -> None:
        """Writes it, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        with written_whole(path) as beside:
            beside.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")


def fingerprint(folder: Path, settings: dict[str, Any]) -> str:
    """Returns a digest of what a run's values depend on: its settings and hooks."""
    left_out = {*OF_PLACE}
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
        self._sent, self._high, self._at = sent, sent.high, sent.at
        self._number, self._digest = 0, hashlib.sha256()
        self._skipping = False

    def begin(self, lines: Sequence[str]) -> bool:
        """Finds out where to go on; returns whether steps were taken again, or are about to be.

        Args:
            lines: that are there when the run is started
        """
        done = lines[: self._sent.lines]
        for line in done:
            self._take(line)
        if len(done) == self._sent.lines and self._digest.hexdigest() == self._sent.digest:
            return False
        self._number, self._digest = 0, hashlib.sha256()
        self._skipping = True
        return True

    @property
    def number(self) -> int:
        """How many lines were gone through."""
        return self._number

    def next(self, line: str, step: int) -> Mark | None:
        """Goes on by one line; returns the place behind it, or None if it was sent before."""
        self._take(line)
        if self._skipping and step == self._high:
            self._at -= 1
        if self._skipping and (step < self._high or (step == self._high and self._at >= 0)):
            return None
        self._skipping = False
        return Mark(self._number, self._digest.hexdigest())

    def _take(self, line: str) -> None:
        self._number += 1
        self._digest.update(line.encode() + b"\n")
