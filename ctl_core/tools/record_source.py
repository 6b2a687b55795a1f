"""What TFRecord files are written of: examples that can be read in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctl_core.data.manifest import Feature
from ctl_core.errors import SetupError, one_line
from ctl_core.files import from_here
from ctl_core.settings import nearest, shown
from ctl_core.tools.record_options import Options

_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}


@dataclasses.dataclass(frozen=True)
class Damaged:
    """Input that is no example: where it is, and why."""

    where: str
    why: str


@dataclasses.dataclass(frozen=True)
class Example:
    """One example.

    Attributes:
        values: by feature: a number, bytes, or a list of these
        shapes: of its images
    """

    values: dict[str, Any]
    shapes: dict[str, list[int | None]]


@dataclasses.dataclass(frozen=True)
class Source:
    """All examples.

    Attributes:
        features: by name
        label: the one to predict
        class_names: of a label that was text
        hashes: of the examples' keys, int64, by which they are ordered and put into splits
        splits: of each example, by folder or file, as its place in SPLITS, int8
        bytes: of all, about
        state: what would be otherwise if the source were changed, as JSON can hold it
        damaged: what was found at once
        read: (indices) -> their examples, or why there is none
        notes: what a user should know of the features
    """

    features: dict[str, Feature]
    label: str | None
    class_names: list[str]
    hashes: np.ndarray
    splits: np.ndarray
    bytes: int
    state: list[Any]
    damaged: list[Damaged]
    read: Callable[[np.ndarray], Iterator[Example | Damaged]]
    notes: list[str] = dataclasses.field(default_factory=list)


def split_named(name: str) -> str:
    """Returns the split that a folder or file of a name is, or an empty text."""
    return _SPLITS.get(name.lower(), "")


def check_columns(options: Options, names: Sequence[str]) -> None:
    """Checks that a table has the columns that the options name, and one that is not left out.

    Raises:
        SetupError: it has not.
    """
    wanted = [("label", options.label), ("key", options.key), *(("drop", n) for n in options.drop)]
    for option, name in wanted:
        if name is not None and name not in names:
            raise SetupError(
                f"{option}: {from_here(options.source)} has no column {shown(name)}"
                f"{nearest(name, names)} (there: {one_line(', '.join(names), 200)})"
            )
        if option != "drop" and name in options.drop:
            raise SetupError(f"{option}: {name} is left out by --drop; take one of the two.")
    if not set(names) - set(options.drop):
        raise SetupError(f"{from_here(options.source)}: no column is left; drop fewer.")


def file_states(paths: list[Path]) -> list[Any]:
    """Returns what is otherwise if files are changed: name, size and time of change of each."""
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in paths]
