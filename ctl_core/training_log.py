"""training_log.md: what was expected of each run that has a note, and what came of it.

The file is the user's: an entry is appended once, and of it only the line of the result is written
again. Runs that end at the same time wait for each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from pathlib import Path

from ctl_core import run_process
from ctl_core.errors import SetupError, one_line
from ctl_core.files import alone_in, from_here, written_whole
from ctl_core.layers import flat, load_config
from ctl_core.metric_values import worded
from ctl_core.provenance import commit
from ctl_core.run_process import Process
from ctl_core.settings import Config, shown

FILE = "training_log.md"
_TITLE = "# Training log\n"
_EXPECTED, _RESULT = "- Expected: ", "- Result: "
# Of where a run is, not of what it is.
_PLACE = ("run_name", "runs_dir", "debug")


def check_note(note: str, folder: Path) -> None:
    """Refuses a note for a run that has another one.

    The same one is no mistake: a command may be given again to go on with its run.

    Raises:
        SetupError: it has, the note says nothing, or the file cannot be read.
    """
    if not note.strip():
        raise SetupError("note: expected a text, what you expect of the run.")
    path = Path(FILE).absolute()
    entry = _entry(_read(path), from_here(folder))
    if entry is not None and f"{_EXPECTED}{_line(note)}" not in entry[0].splitlines():
        raise SetupError(
            f"note: {from_here(folder)} has an entry in {from_here(path)} already; write there, or "
            "choose another run_name."
        )


def begin(folder: Path, note: str, config: Config) -> None:
    """Appends the entry of a run, unless it has one of the same note.

    Raises:
        SetupError: it has another.
        OSError: the file cannot be written.
    """
    path = Path(FILE).absolute()
    with alone_in(path.parent):
        check_note(note, folder)
        text = _read(path)
        if _entry(text, from_here(folder)) is None:
            lines = [
                f"## {from_here(folder)}\n",
                f"- Started: {time.strftime('%F %H:%M')}, {_commit()}",
                f"- Settings: {_changed(config)}",
                f"{_EXPECTED}{_line(note)}",
                f"{_RESULT}none yet",
            ]
            text = (text or _TITLE).rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"
            _write(path, text)
    process = run_process.read_process(folder)
    if process is not None:
        process.training_log = str(path)
        run_process.write(folder, process)


def complete(folder: Path, process: Process) -> None:
    """Writes the result into a run's entry, if there is one.

    Raises:
        OSError: the file cannot be written.
    """
    if process.training_log is None:
        return
    path = Path(process.training_log)
    with alone_in(path.parent):
        text, name = _read(path), os.path.relpath(folder, path.parent)
        entry = _entry(text, from_here(folder)) or _entry(text, name)
        if entry is None:  # taken out by hand
            return
        old, at = entry
        result = f"{_RESULT}{_result(process)}"
        new, count = re.subn(
            rf"^{re.escape(_RESULT.rstrip())}.*$", lambda _: result, old, count=1, flags=re.M
        )
        if not count:
            new = old.rstrip("\n") + f"\n{result}\n" + "\n" * (len(old) - len(old.rstrip("\n")) - 1)
        _write(path, text[:at] + new + text[at + len(old) :])


def note_of(folder: Path) -> str:
    """Returns what is expected of a run, as its entry says, or "" where it has none."""
    process = run_process.read_process(folder)
    path = Path((process and process.training_log) or Path(FILE).absolute())
    with contextlib.suppress(SetupError):
        text, name = _read(path), os.path.relpath(folder, path.parent)
        entry = _entry(text, from_here(folder)) or _entry(text, name)
        for line in entry[0].splitlines() if entry else ():
            if line.startswith(_EXPECTED):
                return line.removeprefix(_EXPECTED)
    return ""


def _result(process: Process) -> str:
    values = worded(process.metrics)
    how = {"ended": "ended early", "stopped": f"stopped by {process.line}"}.get(
        str(process.how), str(process.how)
    )
    parts = [f"{how}, at step {process.step}" if process.step is not None else how]
    if process.how == "failed":
        parts.append(one_line(process.line))
    if values:
        parts.append(f"evaluation: {values}")
    ended = process.ended or time.time()
    parts.append(f"{time.strftime('%F %H:%M', time.localtime(ended))}")
    parts.append(f"{ended - process.started:.0f} s")
    return "; ".join(parts)


def _entry(text: str, name: str) -> tuple[str, int] | None:
    """Returns the text of a run's entry, from its heading to the next one, and where it begins."""
    found = re.search(rf"^## {re.escape(name)}[ \t]*$(?:(?!^## ).*\n?)*", text, re.M)
    return None if found is None else (found[0], found.start())


def _line(note: str) -> str:
    return one_line(note, 2000)


def _commit() -> str:
    name, dirty = commit()
    if name is None:
        return "no commit"
    return f"commit {name[:10]}" + " with changes" * bool(dirty)


def _changed(config: Config) -> str:
    """Says by which settings a run differs from config.yaml, or from the defaults without it."""
    project, where = Config(), "the defaults"
    with contextlib.suppress(SetupError):
        project, where = load_config("config.yaml"), "config.yaml"
    before, after = (flat(dataclasses.asdict(each)) for each in (project, config))
    found = [
        f"{name} {shown(value, 40)}"
        for name, value in after.items()
        if name not in _PLACE and before.get(name) != value
    ]
    return ", ".join(found) or f"those of {where}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{from_here(path)}: cannot be read: {one_line(error)}.") from error


def _write(path: Path, text: str) -> None:
    target = Path(os.path.realpath(path))  # a link stays one
    with written_whole(target) as beside:
        beside.write_text(text, encoding="utf-8")
