"""``compare``: how runs ended, and in which settings they differ, as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ctl_core.tools.columns import Column, fit, print_table, room
from ctl_core.tools.curves import (
    Curves,
    damage,
    differing,
    last_of,
    read_curves,
    rows_of,
    speed_of,
)
from ctl_core.tools.named import parser_of


def compare(argv: Sequence[str]) -> int:
    """Prints a column for each run: its state, step, time and last values; then settings."""
    parser = parser_of("compare", "Compares runs: last values, time, settings that differ.")
    parser.add_argument("names", nargs="+", metavar="RUN", help="the runs, by their names")
    parser.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    options = parser.parse_args(argv)
    names = list(dict.fromkeys(options.names))
    several = [read_curves(options.runs_dir, name) for name in names]
    if options.json:
        runs = [
            {"name": run.name, "state": run.found.state, "step": run.found.step}
            | {"seconds": run.seconds, "examples_per_second": speed_of(run)}
            | {"metrics": last_of(run), "damaged_lines": sum(run.damaged.values())}
            for run in several
        ]
        print(json.dumps({"runs": runs, "settings": differing(several)}))
        return 0
    for number, columns in enumerate(_tables(several)):
        if number:
            print()
        print_table(columns)
    for line in damage(several):
        print(line)
    return 0


def _tables(several: Sequence[Curves]) -> list[list[Column]]:
    """Returns the columns of one table, or of several where not all runs fit beside each other."""
    rows = rows_of(several, 40)
    names = [name for name, _ in rows]
    whole = 2 * max(map(len, names)) <= room()
    first = Column("", names, least=None if whole else 12)
    tables = [[first]]
    for number, run in enumerate(several):
        column = Column(run.name, [row[number] for _, row in rows], least=10, right=True)
        if len(tables[-1]) > 1 and not fit([*tables[-1], column]):
            tables.append([first])
        tables[-1].append(column)
    return tables
