"""The records of checkpoints, which make them count, and the folder that checkpoints lie in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from ctl_core import __version__
from ctl_core.evaluation.selection import best_step
from ctl_core.run.errors import SetupError
from ctl_core.run.files import from_here, written_whole

# Raised when an engine could misread a record of this one.
FORMAT = 2
_RECORD = re.compile(r"ckpt-(\d+)\.json")
_OWN = re.compile(r"[a-z]+-(\d+)[-.]")  # what the engine writes
_USERS = re.compile(r"-(\d+)\.index")  # what the user's manager writes


class Damaged(Exception):
    """A part of a checkpoint cannot be read; the message says which and why."""


@dataclasses.dataclass
class Record:
    """What a checkpoint knows besides tensors.

    Attributes:
        step: the step it was taken after
        input: what a position in the data belongs to, by name: two runs whose values are the same
            read the same examples in the same order
        input_saved: whether every process has saved a position that is whole
        replicas: by how many the variables of replicas were saved
        learning_rate: the setting, to notice when it is changed
        frozen: the freeze flags of layers and variables
        created: the names of the variables in the engine's part
        progress: see ``state.Progress``
        format: what ``FORMAT`` was when it was written
        engine: the version of the engine that wrote it
    """

    step: int
    input: dict[str, Any]
    input_saved: bool
    replicas: int
    learning_rate: float
    frozen: list[bool]
    created: list[str]
    progress: dict[str, Any]
    format: int = FORMAT
    engine: str = __version__


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps of which a folder of checkpoints has records, newest first."""
    matches = (_RECORD.fullmatch(path.name) for path in folder.glob("engine/ckpt-*.json"))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def find_user_part(folder: Path, step: int) -> Path:
    """Returns what the files of the user's part begin with, whatever the manager calls them.

    Raises:
        Damaged: there is none.
    """
    for path in folder.glob(f"*-{step}.index"):
        return path.with_suffix("")
    raise Damaged("a file of it is gone")


def write_record(folder: Path, record: Record) -> None:
    """Writes the record of a checkpoint whose files are all written, whole or not at all.

    All of it is put on the disk itself: a power cut counts as a kill.

    Raises:
        OSError: it cannot be written.
    """
    engine, step = folder / "engine", record.step
    path = engine / f"ckpt-{step}.json"
    _sync(*_files_of(folder, step), folder / "checkpoint", engine, folder)
    with written_whole(path) as beside:
        beside.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
    _sync(path, engine)


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
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
                f"{from_here(folder)}: its checkpoints are of ctl_core "
                f"{content.get('engine', '0.3')}, and {__version__} cannot go on from them; begin "
                f"another run with their weights: --init-from {from_here(folder.parent)}."
            )
        record = Record(**content)
    except (OSError, ValueError, TypeError) as error:
        raise Damaged("its record cannot be read") from error
    if record.step != step:
        raise Damaged(f"its record is that of step {record.step}")
    return record


def read_first_batch_size(folder: Path) -> int | None:
    """Returns the ``per_replica_batch_size`` of a run's first start; None if there is none."""
    for step in saved_steps(folder):
        with contextlib.suppress(Damaged):
            return read_record(folder, step).input["per_replica_batch_size"]  # type: ignore[no-any-return]
    return None


def _files_of(folder: Path, step: int) -> list[Path]:
    """Returns the files of a checkpoint, the record last."""
    found = [*folder.glob(f"*-{step}.*"), *folder.glob(f"engine/*-{step}[-.]*")]
    return sorted(found, key=_is_record)


def _is_record(path: Path) -> bool:
    return path.suffix == ".json"


def remove_leftovers(folder: Path) -> None:
    """Removes what a process that was killed while saving left half-written."""
    for pattern in ("*_temp", "*.tmp", "engine/*_temp", "engine/*.tmp"):
        for path in folder.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def remove_orphans(folder: Path) -> None:
    """Removes what the engine has written beside a user's part that is not there any more."""
    engine = folder / "engine"
    matches = map(_USERS.search, os.listdir(folder))
    kept = {int(match[1]) for match in matches if match}
    own = [(path, _OWN.match(path.name)) for path in engine.iterdir()]
    orphans = [path for path, match in own if match and int(match[1]) not in kept]
    for path in sorted(orphans, key=_is_record, reverse=True):
        path.unlink(missing_ok=True)


def keep_best(folder: Path, record: Record) -> None:
    """Keeps the best checkpoint, as the record of the newest one has it, in the folder ``best``."""
    step, best = best_step(record.progress["best"]), folder / "best"
    if step in saved_steps(folder) and step not in saved_steps(best):
        with written_whole(best) as beside:
            copy_checkpoint(folder, step, beside)


def copy_checkpoint(folder: Path, step: int, to: Path) -> None:
    """Copies a checkpoint; its files are shared where the file system can do that."""
    (to / "engine").mkdir(parents=True)
    for path in _files_of(folder, step):
        copy = to / path.relative_to(folder)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copy2(path, copy)
