"""training_log.md: what was expected of each run that has a note, and what came of it.

Lines are appended, and never changed: an entry when a run with a note begins, and a line whenever a
run that has an entry ends. The file is the user's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctl_core.console import format_evaluation
from ctl_core.errors import SetupError, one_line
from ctl_core.files import from_here
from ctl_core.run.listeners import Listener
from ctl_core.run.provenance import read_commit
from ctl_core.settings import Config, flatten, load_config, shown

# Of where a run is, not of what it is.
_PLACE = ("run_name", "runs_dir", "debug")


class TrainingLog(Listener):
    """Appends to the training_log.md of the current folder."""

    def __init__(self, note: str | None) -> None:
        """``note`` says what is expected of the run; without one, it gets no entry."""
        self._path = Path("training_log.md").absolute()
        self._note, self._run = note, ""
        self._evaluated: tuple[Mapping[str, float], int] | None = None

    def start(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Appends the entry of a run, unless it has one of the same note.

        Raises:
            OSError: it cannot be written.
        """
        self._run = from_here(folder)
        if self._note is None:
            return
        text = self._read() or "# Training log\n"
        entry = f"\n## {self._run}\n\n- Expected: {one_line(self._note, 2000)}\n"
        if entry in text:
            return
        name, dirty = read_commit()
        of = "no commit" if name is None else f"commit {name[:10]}{' with changes' * bool(dirty)}"
        entry += f"- Settings: {_find_changes(config)}\n"
        entry += f"- {time.strftime('%F %H:%M')}: begins, {of}\n"
        self._append(entry if self._path.exists() else text + entry)

    def values(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Keeps the values of the last evaluation."""
        if split == "eval":
            self._evaluated = values, step

    def end(self, step: int, how: str) -> None:
        """Appends how a run has ended, if it has an entry."""
        if f"\n## {self._run}\n" in self._read():
            result = f"{how} at step {step}"
            if self._evaluated is not None:
                result += f"; {format_evaluation(*self._evaluated, step)}"
            self._append(f"- {time.strftime('%F %H:%M')}: {self._run} {one_line(result)}\n")

    def _read(self) -> str:
        return self._path.read_text(errors="replace") if self._path.exists() else ""

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def _find_changes(config: Mapping[str, Any]) -> str:
    """Says by which settings a run differs from config.yaml, or from the defaults without it."""
    project, where = Config(), "the defaults"
    with contextlib.suppress(SetupError):
        project, where = load_config("config.yaml"), "config.yaml"
    before = flatten(dataclasses.asdict(project))
    found = [
        f"{name} {shown(value, 40)}"
        for name, value in flatten(config).items()
        if name not in _PLACE and before.get(name) != value
    ]
    return ", ".join(found) or f"those of {where}"
