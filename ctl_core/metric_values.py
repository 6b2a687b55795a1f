"""The values of metrics: as metrics.jsonl holds them, read from there, and shown in messages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def storable(values: Mapping[str, float]) -> dict[str, float | None]:
    """Returns values as JSON can hold them: None for one that is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def worded(values: Mapping[str, Any]) -> str:
    """Returns values as a person reads them: ``loss 0.2247  accuracy 0.9499``."""
    return "  ".join(
        f"{name} {'NaN' if value is None else format(value, '.4g')}"
        for name, value in values.items()
    )


def evaluation(values: Mapping[str, Any], of: int | None, step: int | None) -> str:
    """Returns the values of an evaluation with its step, where that is another than the run's.

    Args:
        values: of the evaluation
        of: the step that it is of, or None if that is not known
        step: that the run has come to
    """
    where = f" of step {of}" if of is not None and of != step else ""
    return f"evaluation{where}: {worded(values)}"


def read_metrics(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Reads a run's metrics.jsonl; a last line that was cut short by a kill is left out."""
    file = run / name
    return parse_metrics(file.read_text(encoding="utf-8")) if file.is_file() else []


def parse_metrics(text: str) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl, or of a part of one, but those that were cut."""
    lines = []
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(values, dict) and type(step := values.get("step")) is int and step < 1 << 63:
            lines.append(values)
    return lines
