"""training_log.md: what was expected of each run that has a note, and what came of it.

Lines are appended, and never changed: an entry when a run with a note begins, and a line whenever a
run that has an entry ends. The file is the user's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

from ctl_core.errors import SetupError, one_line
from ctl_core.layers import flatten, load_config
from ctl_core.provenance import commit
from ctl_core.settings import Config, shown

FILE = "training_log.md"
# Of where a run is, not of what it is.
_PLACE = ("run_name", "runs_dir", "debug")


def begin(path: Path, run: str, note: str, config: Config) -> None:
    """Appends the entry of a run, unless it has one of the same note.

    Args:
        path: of the file
        run: such as ``runs/a``
        note: what is expected of the run
        config: its settings

    Raises:
        OSError: it cannot be written.
    """
    text = path.read_text(errors="replace") if path.exists() else "# Training log\n"
    entry = f"\n## {run}\n\n- Expected: {one_line(note, 2000)}\n"
    if entry in text:
        return
    name, dirty = commit()
    of = "no commit" if name is None else f"commit {name[:10]}{' with changes' * bool(dirty)}"
    entry += f"- Settings: {_changed(config)}\n- {time.strftime('%F %H:%M')}: begins, {of}\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(entry if path.stat().st_size else text + entry)


def end(path: Path, run: str, result: str) -> None:
    """Appends how a run has ended, if it has an entry.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and f"\n## {run}\n" in path.read_text(errors="replace"):
        with path.open("a", encoding="utf-8") as file:
            file.write(f"- {time.strftime('%F %H:%M')}: {run} {one_line(result)}\n")


def _changed(config: Config) -> str:
    """Says by which settings a run differs from config.yaml, or from the defaults without it."""
    project, where = Config(), "the defaults"
    with contextlib.suppress(SetupError):
        project, where = load_config("config.yaml"), "config.yaml"
    before, after = (flatten(dataclasses.asdict(each)) for each in (project, config))
    found = [
        f"{name} {shown(value, 40)}"
        for name, value in after.items()
        if name not in _PLACE and before.get(name) != value
    ]
    return ", ".join(found) or f"those of {where}"
