"""Records, which make checkpoints count; the files of a checkpoint; the copy kept as the best."""

from __future__ import annotations

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
        compiled: whether XLA compiles the steps of the run; None in a record that does not say so
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
    compiled: bool | None = None
    learnt: dict[str, Any] = dataclasses.field(default_factory=dict)
    format: int = FORMAT
    engine: str = __version__


def list_saved_steps(folder: Path) -> list[int]:
    """Returns the steps that a folder of checkpoints has records of, newest first."""
    matches = (re.fullmatch(r"ckpt-(\d+)\.json", name) for name in _list(folder / "engine"))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _list(folder: Path) -> list[str]:
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
    _flush_to_disk(*_list_files(folder, record.step), folder / "checkpoint", engine, folder)
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


def _list_files(folder: Path, step: int) -> list[Path]:
    """Returns the files of a checkpoint, the record last.

    Of the files that each process writes for itself, such as ``statistics-8-0``, the ones of all
    processes.
    """
    engine = folder / "engine"
    of_this_step = re.compile(rf"\w+-{step}\b")
    files = [folder / name for name in _list(folder) if f"-{step}." in name]
    files += [engine / name for name in _list(engine) if of_this_step.match(name)]
    return sorted(files, key=lambda path: path.suffix == ".json")


def remove_orphans(folder: Path) -> None:
    """Removes the engine's files of checkpoints whose user's part the manager has deleted.

    A user's part under another prefix, which the manager does not delete, keeps a checkpoint.
    The record is removed first, so that a checkpoint that is half removed does not count.
    """
    prefixes = [Path(name).stem for name in _list(folder) if name.endswith(".index")]
    kept = {prefix.rpartition("-")[2] for prefix in prefixes}
    for step in list_saved_steps(folder):
        if str(step) in kept:
            continue
        for path in reversed(_list_files(folder, step)):
            path.unlink(missing_ok=True)


def find_best_step(best: dict[str, list[float]]) -> int:
    """Returns the step of the checkpoint that ``keep_best`` keeps, or -1.

    Args:
        best: by criterion the best value, its step, and the evaluations since; see ``Criterion``
    """
    steps = [int(step) for key, (_, step, _) in best.items() if key.startswith("keep_best=")]
    return max(steps, default=-1)


def keep_best(folder: Path, record: Record, source: Path | None = None) -> None:
    """Copies the best checkpoint to the folder ``best``, unless it is there already.

    Args:
        folder: the run's folder of checkpoints
        record: of the newest checkpoint, which knows the best step
        source: the folder of checkpoints that a run was forked from, if that has the newest one
    """
    step = find_best_step(record.progress["best"])
    best = folder / "best"
    if step < 0:
        return
    source = source or folder
    for place in (source, source / "best"):
        if step in list_saved_steps(place) and step not in list_saved_steps(best):
            with atomic_write(best) as temporary:
                _copy(place, step, temporary)


def _copy(folder: Path, step: int, target: Path) -> None:
    """Copies a checkpoint; the copy shares its files where the file system supports that."""
    (target / "engine").mkdir(parents=True)
    for path in _list_files(folder, step):
        copy = target / path.relative_to(folder)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copy2(path, copy)
