"""Records, which make checkpoints count; the files that belong to one; which is kept as best."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from ctl_core import __version__
from ctl_core.run.errors import SetupError
from ctl_core.run.files import atomic_write, relative_path

# Raised when an engine could misread a record of this one.
FORMAT = 2


class Damaged(RuntimeError):
    """A part of a checkpoint cannot be read."""


@dataclasses.dataclass
class Record:
    """What a checkpoint knows besides tensors.

    Attributes:
        input: runs that have the same here read the same examples in the same order
        input_saved: whether a position that is whole was saved
        learning_rate: the setting, to notice when it is changed
        frozen: the freeze flags of layers and variables
        created: the names of the variables in the engine's part
        progress: see ``state.Progress``
        reader: the position of a reader in Python, as a text
        learnt: what preprocessing layers have learnt, see vocabularies.py
        engine: the version of the one that wrote it
    """

    step: int
    input: dict[str, Any]
    input_saved: bool
    replicas: int
    learning_rate: float
    frozen: list[bool]
    created: list[str]
    progress: dict[str, Any]
    reader: str = ""
    learnt: dict[str, Any] = dataclasses.field(default_factory=dict)
    format: int = FORMAT
    engine: str = __version__


def list_saved_steps(folder: Path) -> list[int]:
    """Returns the steps of which a folder of checkpoints has records, newest first."""
    found = (re.fullmatch(r"ckpt-(\d+)\.json", name) for name in _list(folder / "engine"))
    return sorted((int(one[1]) for one in found if one), reverse=True)


def _list(folder: Path) -> list[str]:
    """Returns the names in a folder, if it is there; pathlib's glob takes five times as long."""
    return os.listdir(folder) if folder.is_dir() else []


def find_user_part(folder: Path, step: int) -> Path:
    """Returns what the files of the user's part begin with, whatever the manager calls them."""
    for path in folder.glob(f"*-{step}.index"):
        return path.with_suffix("")
    raise Damaged("a file of it is gone")


def write_record(folder: Path, record: Record) -> None:
    """Writes the record of a checkpoint whose files are all written, whole or not at all.

    All of it is put on the disk itself: a power cut counts as a kill.
    """
    engine, step = folder / "engine", record.step
    path = engine / f"ckpt-{step}.json"
    _sync(*_files_of(folder, step), folder / "checkpoint", engine, folder)
    with atomic_write(path) as beside:
        beside.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
    _sync(path, engine)


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)  # also of folders
        os.fsync(descriptor)
        os.close(descriptor)


def read_record(folder: Path, step: int) -> Record:
    """Reads the record of a checkpoint.

    Raises:
        Damaged: it cannot be read, or is that of another step.
        SetupError: another engine wrote it, whose checkpoints this one could misread.
    """
    try:
        content = json.loads((folder / "engine" / f"ckpt-{step}.json").read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise SetupError(
                f"{relative_path(folder)}: its checkpoints are of ctl_core "
                f"{content.get('engine', '0.3')}, and {__version__} cannot go on from them; begin "
                f"another run with their weights: --init-from {relative_path(folder.parent)}."
            )
        record = Record(**content)
    except (OSError, ValueError, TypeError) as error:
        raise Damaged("its record cannot be read") from error
    if record.step != step:
        raise Damaged(f"its record is that of step {record.step}")
    return record


def _files_of(folder: Path, step: int) -> list[Path]:
    """Returns the files of a checkpoint, the record last."""
    engine, own = folder / "engine", re.compile(rf"\w+-{step}\b")  # of process 0: statistics-8-0
    found = [folder / name for name in _list(folder) if f"-{step}." in name]
    found += [engine / name for name in _list(engine) if own.match(name)]
    return sorted(found, key=lambda path: path.suffix == ".json")


def remove_orphans(folder: Path) -> None:
    """Removes the engine's files of checkpoints whose user's part the manager has deleted."""
    kept = {name[:-6].rpartition("-")[2] for name in _list(folder) if name.endswith(".index")}
    for step in list_saved_steps(folder):
        if str(step) not in kept:
            for path in reversed(_files_of(folder, step)):
                path.unlink(missing_ok=True)


def find_best_step(best: dict[str, list[float]]) -> int:
    """Returns the step of the checkpoint that ``keep_best`` keeps, or -1; see ``Criterion``."""
    steps = [int(step) for key, (_, step, _) in best.items() if key.startswith("keep_best=")]
    return max(steps, default=-1)


def keep_best(folder: Path, record: Record, source: Path | None = None) -> None:
    """Keeps the best checkpoint, of which the newest one's record knows, in the folder ``best``.

    The newest one, and with it the best, may lie in the folder of another run.
    """
    step, best, source = find_best_step(record.progress["best"]), folder / "best", source or folder
    for place in (source, source / "best") if step >= 0 else ():
        if step in list_saved_steps(place) and step not in list_saved_steps(best):
            with atomic_write(best) as beside:
                _copy(place, step, beside)


def _copy(folder: Path, step: int, to: Path) -> None:
    """Copies a checkpoint; its files are shared where the file system can do that."""
    (to / "engine").mkdir(parents=True)
    for path in _files_of(folder, step):
        copy = to / path.relative_to(folder)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copy2(path, copy)
