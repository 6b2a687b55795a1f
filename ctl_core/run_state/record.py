"""The record of a checkpoint: the JSON file that is written last and makes the checkpoint count.

What a folder holds may have been copied, renamed or damaged: nothing of it is believed unchecked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ctl_core import __version__
from ctl_core.errors import SetupError
from ctl_core.files import from_here, written_whole

# Raised when an engine could misread a record of this one.
FORMAT = 2
RECORD = re.compile(r"ckpt-(\d+)\.json")
PART = re.compile(r"(?:ckpt|input|statistics)-(\d+)(?:-\d+)?")
NAME = re.compile(r".*-\d+\.(json|index|data-\d+-of-\d+)")
NUMBER = re.compile(r"-(\d+)$")


_UNKNOWN: dict[str, Any] = {
    "input": {}, "input_saved": False, "replicas": 0, "learning_rate": 0.0, "frozen": [],
    "created": {}, "vocabularies": None, "progress": {"best": {}},
}  # fmt: skip


class Damaged(Exception):
    """A part of a checkpoint cannot be read; the message says which and why."""


@dataclasses.dataclass
class Record:
    """What a checkpoint knows besides tensors.

    Attributes:
        step: the step it was taken after
        path: the user's part, relative to the folder of checkpoints
        input: what a position in the data belongs to, by name: two runs whose values are the same
            read the same examples in the same order
        input_saved: whether every process has saved a position that is whole
        replicas: by how many the variables of replicas were saved
        learning_rate: the setting, to notice when it is changed
        frozen: the freeze flags of layers and variables
        created: of the variables in the engine's part the name and the shape
        vocabularies: the file with what preprocessing layers have learnt, or None
        progress: see ``state.Progress``
        format: what ``FORMAT`` was when it was written
        engine: the version of the engine that wrote it
    """

    step: int
    path: str
    input: dict[str, Any]
    input_saved: bool
    replicas: int
    learning_rate: float
    frozen: list[bool]
    created: dict[str, list[int]]
    vocabularies: str | None
    progress: dict[str, Any]
    format: int = FORMAT
    engine: str = __version__

    @property
    def best(self) -> dict[str, list[float]]:
        """What ``keep_best`` and ``early_stop`` know."""
        return self.progress["best"]  # type: ignore[no-any-return]


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps of which a folder has records, newest first; other names are not ours."""
    return steps_of(path.name for path in folder.glob("ckpt-*.json"))


def steps_of(names: Iterable[str]) -> list[int]:
    """Returns the steps of the records among the names of files, newest first."""
    matches = map(RECORD.fullmatch, names)
    return sorted({int(match[1]) for match in matches if match}, reverse=True)


def write_record(folder: Path, record: Record) -> None:
    """Writes a record, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with written_whole(folder / f"ckpt-{record.step}.json") as beside:
        beside.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")


def sync_files(*paths: Path) -> None:
    """Puts files, and folders, on the disk itself: a power cut counts as a kill.

    Raises:
        OSError: that fails.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_record(folder: Path, step: int) -> Record:
    """Reads a record and checks it.

    Raises:
        Damaged: it cannot be read, or is that of another step.
    """
    path = folder / f"ckpt-{step}.json"
    if not path.is_file():  # a folder, or a named pipe, which would keep us waiting
        raise Damaged("its record is no file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format", 0) != FORMAT:  # of another engine, whose weights can be taken
            known = {name: content[name] for name in ("step", "path")}
            how = {"format": content.get("format", 0), "engine": content.get("engine") or "0.3"}
            content = {**_UNKNOWN, **known, **how}
        record = Record(**content)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise Damaged("its record cannot be read") from error
    for field in dataclasses.fields(Record):
        kind: Any = {"int": int, "str": str, "bool": bool, "float": (int, float)}.get(
            str(field.type), (dict, list, str, type(None))
        )
        if not isinstance(getattr(record, field.name), kind):
            raise Damaged(f"its record has a wrong value for {field.name}")
    match = NUMBER.search(record.path)
    if record.step != step or not match or int(match[1]) != step or "/" in record.path:
        raise Damaged(f"its record is that of step {record.step}, {record.path}")
    return record


def check_format(record: Record, folder: Path) -> None:
    """Refuses to go on from a checkpoint of another engine.

    Args:
        record: of the checkpoint
        folder: of checkpoints

    Raises:
        SetupError: it is one.
    """
    if record.format != FORMAT:
        raise SetupError(
            f"{from_here(folder)}: its checkpoints are of ctl_core {record.engine}, and "
            f"{__version__} cannot go on from them; begin another run with their weights: "
            f"--init-from {from_here(folder.parent)}."
        )


def regular(prefix: str) -> str:
    """Returns the prefix, if the files of that name are files: a named pipe would keep us waiting.

    Raises:
        Damaged: one is not.
    """
    path = Path(prefix)
    for file in path.parent.glob(f"{path.name}.*"):
        if not file.is_file():
            raise Damaged(f"{file.name} is no file")
    return prefix
