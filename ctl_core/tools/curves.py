"""Runs beside each other: what they have measured, and in which settings they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctl_core.errors import SetupError
from ctl_core.files import from_here
from ctl_core.layers import flat, read_file
from ctl_core.metric_values import parse_metrics
from ctl_core.settings import Config, shown
from ctl_core.tools.runs import Found, find_folder, look_at

# Settings that say which run it is, and nothing of what it computes.
_NAMES = ("run_name", "runs_dir")


@dataclasses.dataclass(frozen=True)
class Curves:
    """What a run has measured.

    Attributes:
        name: of its folder
        found: what it does, its last step and last values
        settings: by name, those within others as ``hparams.width``
        values: by split and name of the metric, the steps and what was measured; None is a value
            that is not finite
        damaged: how many lines of its metrics.jsonl could not be read
    """

    name: str
    found: Found
    settings: dict[str, Any]
    values: dict[tuple[str, str], tuple[list[int], list[float | None]]]
    damaged: int


def read_curves(runs_dir: Path | None, name: str) -> Curves:
    """Reads a run's metrics and settings.

    Raises:
        SetupError: there is no such run, or it has measured nothing.
    """
    folder = find_folder(runs_dir, name)
    file = folder / "metrics.jsonl"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    lines = parse_metrics(text)
    values: dict[tuple[str, str], tuple[list[int], list[float | None]]] = {}
    for line in lines:
        for metric, value in line.items():
            if metric not in ("step", "split") and isinstance(value, int | float | None):
                key = (str(line.get("split", "train")), metric)
                steps, measured = values.setdefault(key, ([], []))
                steps.append(line["step"])
                measured.append(value)
    if not values:
        raise SetupError(f"{from_here(folder)}: has no metrics yet; train it further.")
    settings = flat({key: value for key, (_, value) in read_file(folder / "config.yaml").items()})
    damaged = sum(bool(line.strip()) for line in text.splitlines()) - len(lines)
    return Curves(folder.name, look_at(folder), settings, values, damaged)


def differing(several: Sequence[Curves]) -> dict[str, list[Any]]:
    """Returns the settings that are not the same in all runs: the values by name, a run each."""
    defaults = flat(dataclasses.asdict(Config()))
    names = dict.fromkeys(name for run in several for name in run.settings)
    table = {
        name: [run.settings.get(name, defaults.get(name)) for run in several]
        for name in names
        if name not in _NAMES
    }
    return {name: row for name, row in table.items() if any(value != row[0] for value in row)}


def value_of(value: Any, most: int) -> str:
    """Returns a setting as a person reads it; one that a run does not have is a dash."""
    return "-" if value is None else value if isinstance(value, str) else shown(value, most)


def damage(several: Sequence[Curves]) -> list[str]:
    """Says of which runs lines were left out."""
    return [
        f"{run.name}: {run.damaged} damaged line{'s' * (run.damaged > 1)} of metrics.jsonl left out"
        for run in several
        if run.damaged
    ]
