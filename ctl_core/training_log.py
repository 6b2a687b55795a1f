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
from ctl_core.metric_values import PROGRESS, evaluation, read_metrics
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


def begin(folder: Path, note: str, config: Config) -> bool:
    """Appends the entry of a run, unless it has one of the same note.

    Returns:
        Whether it is new.

    Raises:
        SetupError: it has another.
        OSError: the file cannot be written.
    """
    path = Path(FILE).absolute()
    with alone_in(path.parent):
        check_note(note, folder)
        text = _read(path)
        if new := _entry(text, from_here(folder)) is None:
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
    return new


def take_back(folder: Path) -> None:
    """Takes the entry of a run out again, which has not begun.

    Raises:
        SetupError: the file cannot be read.
        OSError: it cannot be written.
    """
    path = Path(FILE).absolute()
    with alone_in(path.parent):
        text = _read(path)
        if (entry := _entry(text, from_here(folder))) is None:
            return
        rest = text[: entry[1]] + text[entry[1] + len(entry[0]) :]
        if rest.strip() == _TITLE.strip():
            path.unlink()
        else:
            _write(path, rest.rstrip("\n") + "\n")


def complete(folder: Path, process: Process) -> None:
    """Writes the result into a run's entry, if there is one.

    Raises:
        OSError: the file cannot be written.
    """
    if process.training_log is None:
        return
    path = Path(process.training_log)
    with alone_in(path.parent):
        try:
            text, name = _read(path), os.path.relpath(folder, path.parent)
        except SetupError as error:
            raise OSError(str(error)) from error
        entry = _entry(text, from_here(folder)) or _entry(text, name)
        if entry is None:  # taken out by hand
            return
        old, at = entry
        result = f"{_RESULT}{_result(process, folder)}"
        new, count = re.subn(
            rf"^{re.escape(_RESULT.rstrip())}.*$", lambda _: result, old, count=1, flags=re.M
        )
        if not count:
            new = old.rstrip("\n") + f"\n{result}\n" + "\n" * (len(old) - len(old.rstrip("\n")) - 1)
        _write(path, text[:at] + new + text[at + len(old) :])


def note_changes(folder: Path, config: Config) -> None:
    """Notes which settings of a run with an entry are about to change, for its result.

    Args:
        folder: of the run, with the settings of its last start
        config: those of this one

    Raises:
        OSError: it cannot be written.
    """
    process = run_process.read_process(folder)
    if process is None or process.training_log is None or not (folder / "config.yaml").is_file():
        return
    with contextlib.suppress(SetupError):
        before = load_config(folder / "config.yaml")
        found = _differing(before, config)
        if found:
            process.changed |= found
            run_process.write(folder, process)


def _result(process: Process, folder: Path) -> str:
    how = {"ended": "ended early", "stopped": f"stopped by {process.line}"}.get(
        str(process.how), str(process.how)
    )
    parts = [f"{how}, at step {process.step}" if process.step is not None else how]
    if process.how == "failed":
        parts.append(one_line(process.line))
    if process.metrics:
        parts.append(evaluation(process.metrics, process.evaluated, process.step))
    ended = process.ended or time.time()
    parts.append(f"{time.strftime('%F %H:%M', time.localtime(ended))}")
    parts.append(f"{_seconds(folder) or ended - process.started:.0f} s")
    if process.changed:
        parts.append(f"at the end with {', '.join(f'{n} {v}' for n, v in process.changed.items())}")
    return "; ".join(parts)


def _seconds(folder: Path) -> float | None:
    """Returns how long a run was trained over all its starts, as ``compare`` has it."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return run_process.seconds_trained(folder, read_metrics(folder, PROGRESS))
    return None


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
    found = [f"{name} {value}" for name, value in _differing(project, config).items()]
    return ", ".join(found) or f"those of {where}"


def _differing(one: Config, other: Config) -> dict[str, str]:
    """Returns the other's settings that differ, by name, as a person reads them."""
    before, after = (flat(dataclasses.asdict(each)) for each in (one, other))
    return {
        name: shown(value, 40)
        for name, value in after.items()
        if name not in _PLACE and before.get(name) != value
    }


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
