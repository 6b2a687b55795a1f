"""``compare``: how runs ended, and in which settings they differ, as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ctl_core.metric_values import worded
from ctl_core.run_process import read_process
from ctl_core.tools.curves import Curves, damage, differing, read_curves, value_of
from ctl_core.tools.runs import age_of, find_folder, parser_of, print_table


def compare(argv: Sequence[str]) -> int:
    """Prints a column for each run: its state, step, time and last values; then settings."""
    parser = parser_of("compare", "Compares runs: last values, time, settings that differ.")
    parser.add_argument("names", nargs="+", metavar="RUN", help="the runs, by their names")
    parser.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    options = parser.parse_args(argv)
    names = list(dict.fromkeys(options.names))
    several = [read_curves(options.runs_dir, name) for name in names]
    settings = differing(several)
    seconds = [_seconds(options.runs_dir, name) for name in names]
    if options.json:
        runs = [
            {"name": run.name, "state": run.found.state, "step": run.found.step}
            | {"seconds": time, "metrics": _last(run), "damaged_lines": run.damaged}
            for run, time in zip(several, seconds, strict=True)
        ]
        print(json.dumps({"runs": runs, "settings": settings}))
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    for run in several:
        table.add_column(run.name, overflow="fold", justify="right")
    table.add_row("state", *(run.found.state for run in several))
    table.add_row("step", *(str(run.found.step) for run in several))
    table.add_row("time of the last start", *("" if s is None else age_of(s) for s in seconds))
    metrics = dict.fromkeys(name for run in several for name in _last(run))
    for name in metrics:
        table.add_row(name, *(_value(run, name) for run in several))
    for name, row in settings.items():
        table.add_row(name, *(value_of(value, 40) for value in row))
    print_table(table)
    for line in damage(several):
        print(line)
    return 0


def _last(run: Curves) -> dict[str, float | None]:
    """Returns the last value of each metric, such as ``eval loss``."""
    return {f"{split} {name}": values[-1] for (split, name), (_, values) in run.values.items()}


def _value(run: Curves, name: str) -> str:
    last = _last(run)
    return worded({"": last[name]}).strip() if name in last else ""


def _seconds(runs_dir: Any, name: str) -> float | None:
    process = read_process(find_folder(runs_dir, name))
    if process is None or process.ended is None:
        return None
    return process.ended - process.started
