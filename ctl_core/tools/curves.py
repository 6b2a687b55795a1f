"""Runs beside each other: what they have measured, and in which settings they differ."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctl_core.errors import SetupError, reason
from ctl_core.files import from_here
from ctl_core.layers import flat, read_file
from ctl_core.metric_values import PROGRESS, numbers_of, parse_metrics, worded
from ctl_core.run_process import seconds_trained
from ctl_core.settings import Config, shown
from ctl_core.tools.named import find_folder
from ctl_core.tools.runs import Found, lasted, look_at

# Settings that say which run it is, and nothing of what it computes.
_NAMES = ("run_name", "runs_dir")

Curve = tuple[list[int], list[float | None]]


@dataclasses.dataclass(frozen=True)
class Curves:
    """What a run has measured.

    Attributes:
        name: of its folder
        found: what it does, its last step and last values
        settings: by name, those within others as ``hparams.width``
        values: by split and name of the metric, the steps and what was measured; None is a value
            that is not finite
        progress: the same of the learning rate and of speeds, by name
        seconds: how long it was trained, in all its starts together; None of an earlier engine's
        damaged: by the name of the file, how many lines could not be read
    """

    name: str
    found: Found
    settings: dict[str, Any]
    values: dict[tuple[str, str], Curve]
    progress: dict[str, Curve]
    seconds: float | None
    damaged: dict[str, int]


def read_curves(runs_dir: Path | None, name: str) -> Curves:
    """Reads a run's metrics and settings.

    Raises:
        SetupError: there is no such run, or it has measured nothing.
    """
    return curves_of(find_folder(runs_dir, name))


def curves_of(folder: Path) -> Curves:
    """Reads the metrics and settings in the folder of a run.

    Raises:
        SetupError: it has measured nothing.
    """
    damaged: dict[str, int] = {}
    lines = _read(folder / "metrics.jsonl", damaged)
    values: dict[tuple[str, str], Curve] = {}
    for line in lines:
        split = str(line.get("split", "train"))
        for metric, value in numbers_of(line).items():
            _add(values.setdefault((split, metric), ([], [])), line["step"], value)
    if not values:
        raise SetupError(
            f"{from_here(folder)}: has no metrics yet; train it further, or with hooks that report."
        )
    lines = _read(folder / PROGRESS, damaged)
    progress: dict[str, Curve] = {}
    for line in lines:
        for name, value in numbers_of(line).items():
            if name != "seconds":
                _add(progress.setdefault(name, ([], [])), line["step"], value)
    settings = flat({key: value for key, (_, value) in read_file(folder / "config.yaml").items()})
    seconds = seconds_trained(folder, lines)
    return Curves(folder.name, look_at(folder), settings, values, progress, seconds, damaged)


def _read(file: Path, damaged: dict[str, int]) -> list[dict[str, Any]]:
    """Reads a file of lines, and counts those that cannot be read.

    Raises:
        SetupError: the file cannot.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError as error:
        raise SetupError(f"{from_here(file)}: cannot be read: {reason(error)}.") from error
    lines = parse_metrics(text)
    if wrong := sum(bool(line.strip()) for line in text.splitlines()) - len(lines):
        damaged[file.name] = wrong
    return lines


def _add(curve: Curve, step: int, value: float | None) -> None:
    curve[0].append(step)
    curve[1].append(value)


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


def rows_of(several: Sequence[Curves], most: int) -> list[tuple[str, list[str]]]:
    """Returns what a table of the runs has, row by row: how they went, and what differs.

    Args:
        several: the runs
        most: characters of a setting
    """
    last = [last_of(run) for run in several]
    rows = [
        ("state", [run.found.state for run in several]),
        ("step", [str(run.found.step) for run in several]),
        ("time trained", ["" if (s := run.seconds) is None else lasted(s) for run in several]),
        ("examples/s", ["" if (s := speed_of(run)) is None else f"{s:.4g}" for run in several]),
    ]
    for name in dict.fromkeys(name for values in last for name in values):
        cells = [worded({"": values[name]}).strip() if name in values else "" for values in last]
        rows.append((name, cells))
    for name, row in differing(several).items():
        rows.append((name, [value_of(value, most) for value in row]))
    return rows


def last_of(run: Curves) -> dict[str, float | None]:
    """Returns the last value of each metric, such as ``eval loss``."""
    return {f"{split} {name}": values[-1] for (split, name), (_, values) in run.values.items()}


def speed_of(run: Curves) -> float | None:
    """Returns at how many examples a second a run was trained, most of its time."""
    _, speeds = run.progress.get("examples_per_second", ([], []))
    return statistics.median(known) if (known := [v for v in speeds if v is not None]) else None


def damage(several: Sequence[Curves]) -> list[str]:
    """Says of which runs lines were left out."""
    return [
        f"{run.name}: {count} damaged line{'s' * (count > 1)} of {file} left out"
        for run in several
        for file, count in run.damaged.items()
    ]
