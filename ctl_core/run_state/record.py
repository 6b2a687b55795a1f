"""The record of a checkpoint: the JSON file that is written last and makes the checkpoint count.

What a folder holds may have been copied, renamed or damaged: nothing of it is believed unchecked.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ctl_core import __version__
from ctl_core.errors import SetupError
from ctl_core.files import from_here, written_whole

# Raised when an engine could misread a record of this one; fields that it does not know count too.
FORMAT = 1
RECORD = re.compile(r"ckpt-(\d+)\.json")
PART = re.compile(r"(?:ckpt|input|statistics)-(\d+)(?:-\d+)?")
NAME = re.compile(r".*-\d+\.(json|index|data-\d+-of-\d+)")
NUMBER = re.compile(r"-(\d+)$")


class Damaged(Exception):
    """A part of a checkpoint cannot be read; the message says which and why."""


@dataclasses.dataclass
class Record:
    """What a checkpoint knows besides tensors; the JSON file that makes it count.

    Attributes:
        step: the step it was taken after
        path: the user's part, relative to the folder of checkpoints
        examples: training examples used so far
        processes, replicas, batch_size: what the input positions belong to
        input_saved: whether every process has saved its input position
        learning_rate: the setting, to notice when it is changed
        done: the keys of ``at_step`` that have run
        frozen: the freeze flags of the model
        evaluated: the step of the last evaluation, or -1
        metrics: its values
        accumulate_steps, last_batch: also what the input position belongs to
        state: what host hooks keep; the chief's
        remainder: what the engine's part holds of what the user's leaves out; None of an engine
            that did not look for it
        vocabularies: the file with what preprocessing layers have learnt, or None
        ended: the step to which the run was to go when it was ended early at this one, or None
        noted: of which steps the loss was not finite, as ``Noted`` has it
        best: the best values of the metrics that decide something, as ``Progress`` has them
        scheduled: whether no hook had assigned lr
        overfit_batches: the setting, which the input position belongs to as well
        unit: how many elements were read at once, also of the input position; 0 if one by one
        format: what ``FORMAT`` was when it was written; 0 of an engine that did not say
        engine: the version of the engine that wrote it, or ""
    """

    step: int
    path: str
    examples: int
    processes: int
    replicas: int
    batch_size: int
    input_saved: bool
    learning_rate: float
    done: list[int]
    frozen: list[bool]
    evaluated: int
    metrics: dict[str, float]
    accumulate_steps: int = 1  # earlier engines had no such setting, nor wrote it
    state: dict[str, Any] = dataclasses.field(default_factory=dict)  # nor this and what follows
    remainder: list[str] | None = None
    vocabularies: str | None = None
    ended: int | None = None
    noted: dict[str, int] = dataclasses.field(default_factory=dict)
    best: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    scheduled: bool = True
    overfit_batches: int = 0
    last_batch: str = "drop"
    unit: int = 0
    format: int = 0
    engine: str = ""

    def holds(self, root: str) -> bool:
        """Whether the engine's part has variables of something, such as ``ema``."""
        return any(name.startswith(f"{root}/") for name in self.remainder or ())


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
    said = {**dataclasses.asdict(record), "format": FORMAT, "engine": __version__}
    with written_whole(folder / f"ckpt-{record.step}.json") as beside:
        beside.write_text(json.dumps(said), encoding="utf-8")


def read_record(folder: Path, step: int) -> Record:
    """Reads a record and checks it.

    Raises:
        Damaged: it cannot be read, or is that of another step.
        SetupError: a newer engine has written it.
    """
    path = folder / f"ckpt-{step}.json"
    if not path.is_file():  # a folder, or a named pipe, which would keep us waiting
        raise Damaged("its record is no file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content.pop("records", None)  # engines before 0.4 kept the files of a manifest there
        _refuse_newer(path, content)
        record = Record(**content)
    except (OSError, ValueError, TypeError) as error:
        raise Damaged("its record cannot be read") from error
    if wrong := [name for name, hint in _hints().items() if not _fits(getattr(record, name), hint)]:
        raise Damaged(f"its record has a wrong value for {wrong[0]}")
    match = NUMBER.search(record.path)
    if record.step != step or not match or int(match[1]) != step or "/" in record.path:
        raise Damaged(f"its record is that of step {record.step}, {record.path}")
    return record


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Record)  # which takes longer than reading a record


def _refuse_newer(path: Path, content: dict[str, Any]) -> None:
    unknown = sorted({*content} - {field.name for field in dataclasses.fields(Record)})
    number, engine = content.get("format", 0), content.get("engine", "")
    if unknown or (isinstance(number, int) and number > FORMAT):
        why = f"has {', '.join(unknown)}" if unknown else f"is of format {number}"
        raise SetupError(
            f"{from_here(path)}: was written by ctl_core {engine or '(of unknown version)'} and "
            f"{why}, which ctl_core {__version__} (format {FORMAT}) does not know; take the newer "
            "engine for this run, by cruft update say. The checkpoint is whole."
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


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of a type, such as ``dict[str, float] | None``."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return True
    if kind is types.UnionType:
        return any(_fits(value, one) for one in inner)
    if isinstance(value, bool) and kind is not bool:
        return False
    if kind is float:
        return isinstance(value, int | float)
    if kind is dict and isinstance(value, dict):
        return all(_fits(part, inner[1]) for part in value.values())
    if kind is list and isinstance(value, list):
        return all(_fits(part, inner[0]) for part in value)
    return isinstance(value, kind)
