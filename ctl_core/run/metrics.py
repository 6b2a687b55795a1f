"""metrics.jsonl: a line for whatever is reported or evaluated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ctl_core.files import written_whole
from ctl_core.run.listeners import Listener

FILE = "metrics.jsonl"


class MetricsFile(Listener):
    """Writes a JSON object a line: step, split, and values by name, None where not finite."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def start(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Opens the file, and takes out the lines of steps that are about to run again.

        Raises:
            OSError: it cannot be written.
        """
        kept = [line for line in read_metrics(self._path) if line["step"] <= step]
        with written_whole(self._path) as beside:
            beside.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def values(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Appends a line."""
        assert self._file is not None
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._file.write(json.dumps({"step": step, "split": split, **finite}) + "\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file of metrics, but for one that a kill has cut; none without it."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            lines.append(values)
    return lines
