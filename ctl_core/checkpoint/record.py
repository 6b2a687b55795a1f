"""Records, which make checkpoints count, and the files of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from ctl_core import __version__
from ctl_core.run.errors import SetupError
from ctl_core.run.files import atomic_write, relative_path

# To be raised when another version of the engine could misread a record of this one.
FORMAT = 2


class Damaged(RuntimeError):
    """A part of a checkpoint cannot be read."""


@dataclasses.dataclass
class Record:
    """The values of a checkpoint that are no tensors.

    Attributes:
        step: how many steps were taken
        input: describes the data; runs with equal descriptions read the same examples in order
        input_saved: whether a complete position in the data was saved
        replicas: the number of replicas that trained
        learning_rate: the setting, to notice when it is changed
        frozen: the flags of ``recording.read_flags``
        created: the names of the variables in the engine's part
        progress: the fields of ``state.Progress``
        reader: the position of a reader in Python, as text
        learnt: the values that preprocessing layers have learned, see vocabularies.py
        format: the ``FORMAT`` of the engine that wrote the record
        engine: the version of that engine
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
    """Returns the steps that a folder of checkpoints has records of, newest first."""
    matches = (re.fullmatch(r"ckpt-(\d+)\.json", name) for name in list_names(folder / "engine"))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def list_names(folder: Path) -> list[str]:
    """Returns the names in a folder; none if it does not exist.

    ``Path.glob`` takes five times as long.
    """
    if not folder.is_dir():
        return []
    return os.listdir(folder)


def find_user_part(folder: Path, step: int) -> Path:
    """Returns the prefix of the user's files of a checkpoint, whatever the manager calls them."""
    for path in folder.glob(f"*-{step}.index"):
        return path.with_suffix("")
    raise Damaged("a file of it is gone")


def write_record(folder: Path, record: Record) -> None:
    """Writes the record of a checkpoint whose other files are all written.

    The record is written completely or not at all. All files are flushed to the disk, so that a
    power cut does no more harm than a kill.
    """
    engine = folder / "engine"
    path = engine / f"ckpt-{record.step}.json"
    _flush_to_disk(*list_files(folder, record.step), folder / "checkpoint", engine, folder)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
    _flush_to_disk(path, engine)


def _flush_to_disk(*paths: Path) -> None:
    """Flushes files, and the entries of folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def read_record(folder: Path, step: int) -> Record:
    """Reads the record of a checkpoint.

    Raises:
        Damaged: it cannot be read, or belongs to another step.
        SetupError: another version of the engine wrote it, and this one could misread it.
    """
    path = folder / "engine" / f"ckpt-{step}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
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


def list_files(folder: Path, step: int) -> list[Path]:
    """Returns the files of a checkpoint, the record last.

    Of the files that each process writes for itself, such as ``statistics-8-0``, the ones of all
    processes.
    """
    engine = folder / "engine"
    of_this_step = re.compile(rf"\w+-{step}\b")
    files = [folder / name for name in list_names(folder) if f"-{step}." in name]
    files += [engine / name for name in list_names(engine) if of_this_step.match(name)]
    return sorted(files, key=lambda path: path.suffix == ".json")
