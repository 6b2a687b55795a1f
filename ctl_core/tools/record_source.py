"""What TFRecord files are written of: examples that can be read in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ctl_core.data.manifest import Feature

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
        keys: by whose hashes examples are ordered and put into splits
        splits: of each example, by folder or file
        bytes: of all, about
        state: what would be otherwise if the source were changed, as JSON can hold it
        damaged: what was found at once
        read: (indices) -> their examples, or why there is none
    """

    features: dict[str, Feature]
    label: str | None
    class_names: list[str]
    keys: list[str] | list[bytes]
    splits: list[str]
    bytes: int
    state: list[Any]
    damaged: list[Damaged]
    read: Callable[[np.ndarray], Iterator[Example | Damaged]]


def split_named(name: str) -> str:
    """Returns the split that a folder or file of a name is, or an empty text."""
    return _SPLITS.get(name.lower(), "")
