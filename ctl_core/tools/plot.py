"""``plot``: the curves of runs, in the terminal or in a file that needs no server."""

from __future__ import annotations

import html
import io
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ctl_core.errors import SetupError, reason
from ctl_core.files import from_here, written_whole
from ctl_core.metric_values import worded
from ctl_core.settings import shown
from ctl_core.tools.curves import Curves, damage, differing, read_curves, value_of
from ctl_core.tools.runs import parser_of

_ENDINGS = (".png", ".svg", ".pdf", ".html")
_BLOCKS = "▁▂▃▄▅▆▇█"
# Columns of a line of blocks, where the terminal has them.
_WIDTH = 60


def plot(argv: Sequence[str]) -> int:
    """Plots every metric of the runs over the steps; without a file, as lines of blocks here."""
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
    content = _page(several) if path.suffix.lower() == ".html" else _picture(several, path.suffix)
    try:
        with written_whole(path) as beside:
            beside.write_bytes(content)
    except OSError as error:
        raise SetupError(
            f"output: {from_here(path)} cannot be written: {reason(error)}; name another place."
        ) from error
    print(f"wrote {from_here(path)}")
    return 0


def labels(several: Sequence[Curves]) -> list[str]:
    """Names each run by what is its own: ``a: learning_rate 0.01, hparams.width 64``."""
    settings = differing(several)
    return [
        ": ".join(
            filter(
                None,
                (run.name, ", ".join(f"{n} {value_of(row[i], 20)}" for n, row in settings.items())),
            )
        )
        for i, run in enumerate(several)
    ]


def _metrics(several: Sequence[Curves]) -> list[str]:
    """Returns the names of the metrics, the loss first."""
    names = dict.fromkeys(name for run in several for _, name in run.values)
    return sorted(names, key=lambda name: name != "loss")


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
        for name in _metrics(several)
        for run in several
        for (split, each), (steps, values) in run.values.items()
        if each == name
    ]
    first = max(len(run) for run, *_ in rows)
    second = max(len(metric) for _, metric, *_ in rows)
    room = Console().width if sys.stdout.isatty() else 10_000
    most = max(len(steps) for *_, steps, _ in rows)
    width = min(max(8, min(_WIDTH, room - first - second - 26)), most)
    for run, metric, steps, values in rows:
        start, end = (worded({"": value}).strip() for value in (values[0], values[-1]))
        line = _blocks(steps, values, width, blocks)
        print(f"{run:{first}}  {metric:{second}}  {start:>9} {line} {end}".rstrip())


def _blocks(steps: Sequence[int], values: Sequence[float | None], width: int, blocks: str) -> str:
    """Draws a curve as one line: a column is the mean of what was measured in its steps."""
    columns: list[list[float]] = [[] for _ in range(width)]
    span = max(1, steps[-1] - steps[0])
    for step, value in zip(steps, values, strict=True):
        if value is not None:
            columns[min(width - 1, (step - steps[0]) * width // span)].append(value)
    means = [math.fsum(column) / len(column) if column else None for column in columns]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * width
    low, high = min(known), max(known)
    drawn, last = "", known[0]
    for mean in means:
        last = last if mean is None else mean
        place = (last - low) / (high - low) if high > low else 0.5
        drawn += blocks[min(len(blocks) - 1, int(place * len(blocks)))]
    return drawn


# ---- In a file ----------------------------------------------------------------------------------


def _figure(several: Sequence[Curves]) -> Any:
    """Draws a panel for each metric, with a line for each run and split.

    Raises:
        SetupError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise SetupError(
            "plot: files need matplotlib, which is not installed; in the project's folder: "
            f"{sys.executable} -m pip install --editable '.[plot]'"
        ) from error
    names = _metrics(several)
    across = min(2, len(names))
    down = math.ceil(len(names) / across)
    figure = Figure(figsize=(6.4 * across, 3.6 * down + 0.3 * len(several)), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    lines: dict[str, Any] = {}
    for panel, name in zip(panels, names, strict=False):
        for index, (run, label) in enumerate(zip(several, labels(several), strict=True)):
            for (split, each), (steps, values) in run.values.items():
                if each != name:
                    continue
                heights = [math.nan if value is None else value for value in values]
                style = {"linestyle": "-" if split == "eval" else ":", "color": f"C{index % 10}"}
                marker = "o" if len(steps) == 1 else None
                what = f"{label} ({split})"
                (line,) = panel.plot(steps, heights, marker=marker, label=what, **style)
                lines.setdefault(what, line)
        panel.set_title(name)
        panel.set_xlabel("step")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    figure.legend(handles=[*lines.values()], loc="outside lower left", fontsize="small")
    return figure


def _picture(several: Sequence[Curves], ending: str) -> bytes:
    content = io.BytesIO()
    _figure(several).savefig(content, format=ending.lower().lstrip("."), dpi=120)
    return content.getvalue()


def _page(several: Sequence[Curves]) -> bytes:
    """Returns a page that opens without a network: the picture, last values, settings."""
    svg = _picture(several, ".svg").decode()
    svg = svg[svg.index("<svg") :]
    rows = [
        ("state", [run.found.state for run in several]),
        ("step", [str(run.found.step) for run in several]),
    ]
    for name, row in differing(several).items():
        rows.append((name, [value_of(value, 60) for value in row]))
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in several)
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>\n"
        for name, row in rows
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
