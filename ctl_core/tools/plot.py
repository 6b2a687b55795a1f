"""``plot``: the curves of runs, in the terminal or in a file that needs no server."""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len

from ctl_core.errors import SetupError, reason
from ctl_core.files import from_here, written_whole
from ctl_core.metric_values import worded
from ctl_core.settings import shown
from ctl_core.tools.columns import room
from ctl_core.tools.curves import Curves, damage, read_curves, rows_of
from ctl_core.tools.figure import WORDS, metrics_of, picture, progress_of
from ctl_core.tools.named import parser_of

_ENDINGS = (".png", ".svg", ".pdf", ".html")
_BLOCKS = "▁▂▃▄▅▆▇█"
# Columns of a line of blocks, where the terminal has them; and at least.
_WIDTH = 60
_LEAST = 8
# Columns of a value.
_VALUE = 9


def plot(argv: Sequence[str]) -> int:
    """Plots metrics, learning rate and speed over the steps; without a file, as blocks here."""
    parser = parser_of("plot", "Plots what runs have measured, beside each other.")
    parser.add_argument("names", nargs="+", metavar="RUN", help="the runs, by their names")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"a file: {', '.join(_ENDINGS)}"
    )
    options = parser.parse_args(argv)
    path: Path | None = options.output
    if path is not None and path.suffix.lower() not in _ENDINGS:
        raise SetupError(
            f"output: expected the name of a {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]} file, "
            f"got {shown(str(path))}."
        )
    several = [read_curves(options.runs_dir, name) for name in dict.fromkeys(options.names)]
    for line in damage(several):
        print(line)
    if path is None:
        _print_blocks(several)
        return 0
    ending = path.suffix.lower().lstrip(".")
    content = _page(several) if ending == "html" else picture(several, ending)
    try:
        with written_whole(path) as beside:
            beside.write_bytes(content)
    except OSError as error:
        raise SetupError(
            f"output: {from_here(path)} cannot be written: {reason(error)}; name another place."
        ) from error
    print(f"wrote {from_here(path)}")
    return 0


# ---- In the terminal ----------------------------------------------------------------------------


def _print_blocks(several: Sequence[Curves]) -> None:
    encoding = sys.stdout.encoding or "ascii"
    try:
        _BLOCKS.encode(encoding)
        blocks = _BLOCKS
    except UnicodeEncodeError:  # a terminal without them
        blocks = ".:-=+*#@"
    rows = [
        (run.name, f"{split} {name}", steps, values)
        for name in metrics_of(several)
        for run in several
        for (split, each), (steps, values) in run.values.items()
        if each == name
    ]
    rows += [
        (run.name, WORDS.get(name, name), *run.progress[name])
        for name in progress_of(several)
        for run in several
        if name in run.progress
    ]
    first = max(cell_len(run) for run, *_ in rows)
    second = max(cell_len(metric) for _, metric, *_ in rows)
    least, greatest = min(min(row[2]) for row in rows), max(max(row[2]) for row in rows)
    left = room() - first - second - 2
    # Where names leave no room, a curve stands below its own; the value it begins with goes first.
    below = left < _LEAST + 3 + _VALUE
    begins = left >= _LEAST + 4 + 2 * _VALUE
    left = room() if below else left - _VALUE - 1 if begins else left
    width = max(_LEAST, min(_WIDTH, left - _VALUE - 3, max(len(row[2]) for row in rows)))
    for run, metric, steps, values in rows:
        start, end = (worded({"": value}).strip() for value in (values[0], values[-1]))
        name = f"{run}{' ' * (first - cell_len(run))}  {metric}{' ' * (second - cell_len(metric))}"
        if below:
            print(f"{run}  {metric}")
            name = ""
        begin = f"{start:>{_VALUE}} " if begins else ""
        drawn = _blocks(steps, values, (least, greatest), width, blocks)
        print(f"{name}  {begin}{drawn} {end}")
    print(f"steps {least} to {greatest}" if least < greatest else f"step {least}")


def _blocks(
    steps: Sequence[int],
    values: Sequence[float | None],
    span: tuple[int, int],
    width: int,
    blocks: str,
) -> str:
    """Draws a curve as one line, from the first to the last step of all that are drawn.

    A column is the mean of what was measured in its steps; where that is nothing, it lies on the
    line between its neighbours. It is blank where nothing was finite, and beyond the curve.
    """
    columns: list[list[float] | None] = [None] * width
    first, last = span
    for step, value in zip(steps, values, strict=True):
        place = min(width - 1, (step - first) * width // max(1, last - first))
        columns[place] = [*(columns[place] or []), *([] if value is None else [value])]
    means = {i: math.fsum(c) / len(c) for i, c in enumerate(columns) if c}
    if not means:
        return " " * width
    low, high = min(means.values()), max(means.values())
    drawn = ""
    for i, column in enumerate(columns):
        before = max((known for known in means if known <= i), default=None)
        after = min((known for known in means if known >= i), default=None)
        if before is None or after is None or column == []:
            drawn += " "
            continue
        share = (i - before) / max(1, after - before)
        mean = means[before] * (1 - share) + means[after] * share
        height = (mean - low) / (high - low) if high > low else 0.5
        drawn += blocks[min(len(blocks) - 1, int(height * len(blocks)))]
    return drawn


# ---- In a file ----------------------------------------------------------------------------------


def _page(several: Sequence[Curves]) -> bytes:
    """Returns a page that opens without a network: the picture, and the table of ``compare``."""
    svg = picture(several, "svg").decode()
    svg = svg[svg.index("<svg") :]
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in several)
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>\n"
        for name, row in rows_of(several, 60)
    )
    title = html.escape(", ".join(run.name for run in several))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
svg {{ width: 100%; height: auto }}
th, td {{ text-align: left; padding: 0.2rem 1rem 0.2rem 0; vertical-align: top }}
</style></head>
<body><h1>{title}</h1>
{svg}
<table><tr><th></th>{head}</tr>
{body}</table></body></html>
""".encode()
