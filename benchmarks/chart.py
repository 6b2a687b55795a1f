"""Draws the times of a report as bars, an SVG file without further packages.

A reader's system chooses light or dark; the picture brings a background of its own, so that it can
be read on any page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

Row = Sequence[str]

# The columns of the table that are shown, with their name and the class of their color.
SERIES = {
    "compiled": ("this engine, compiled", "compiled"),
    "engine": ("this engine", "engine"),
    "uncompiled": ("this engine, not compiled", "uncompiled"),
    "many steps": ("Keras fit, 50 steps a call", "many"),
    "Keras": ("Keras fit", "fit"),
    "textbook loop": ("loop of your own", "loop"),
}
# The rows of the table that are shown: steps on one device whose loss is read every 50 steps.
SHOWN = {"devices": "1", "read every": "50"}
LEFT_OUT = ("checkpoints", "mixed")

WIDTH = 580
BAR, GAP, GROUP_GAP = 15, 3, 20
LABELS, NUMBERS = 116, 134
TOP = 84
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.name { font-weight: 600; }
.number, .legend { font-size: 12px; fill: #57606a; }
.page { fill: #ffffff; stroke: #d0d7de; }
.compiled { fill: #1a7f5a; } .engine { fill: #4051b5; } .uncompiled { fill: #8a96d8; }
.many { fill: #c2782b; } .fit { fill: #dca968; } .loop { fill: #8c959f; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.number, .legend { fill: #a9b3be; }
.page { fill: #1e2129; stroke: #3b4250; }
.compiled { fill: #3fb98a; } .engine { fill: #8294f0; } .uncompiled { fill: #5866a8; }
.many { fill: #e39a4d; } .fit { fill: #a9793f; } .loop { fill: #7d8590; }
}"""


def select_rows(times: Sequence[Row]) -> Iterator[Mapping[str, str]]:
    """Yields the rows of the table of times that the chart shows, by column."""
    names, *rows = times
    for cells in rows:
        row = dict(zip(names, cells, strict=True))
        if any(word in row["section"] for word in LEFT_OUT):
            continue
        # Some sections compare the engine with itself only, so they have no time of ``fit``.
        if row["Keras"] and all(row[name] == value for name, value in SHOWN.items()):
            yield row


def format_time(microseconds: float) -> str:
    """Returns a time with its unit, in two or three digits."""
    if microseconds >= 1000:
        return f"{microseconds / 1000:.1f} ms"
    return f"{microseconds:.0f} µs"


def draw_chart(times: Sequence[Row]) -> str:
    """Returns the chart: for each model its time per step, relative to that of ``fit``.

    Args:
        times: the table of times of a report; the first row names the columns
    """
    rows = list(select_rows(times))
    series = [name for name in SERIES if any(row.get(name) for row in rows)]
    longest = max(
        float(row[name]) / float(row["Keras"]) for row in rows for name in series if row.get(name)
    )
    scale = (WIDTH - LABELS - NUMBERS) / longest
    shapes: list[str] = []
    y = TOP
    for row in rows:
        shapes.append(
            f'<text class="name" x="16" y="{y + BAR - 3}">{escape(row["section"])}</text>'
        )
        for name in series:
            if not row.get(name):
                continue
            time, reference = float(row[name]), float(row["Keras"])
            width = max(1.0, time / reference * scale)
            number = format_time(time)
            if name != "Keras":
                number += f", {time / reference:.2f} of fit"
            shapes += [
                f'<rect class="{SERIES[name][1]}" x="{LABELS}" y="{y}" width="{width:.1f}" '
                f'height="{BAR}" rx="2"/>',
                f'<text class="number" x="{LABELS + width + 6:.1f}" y="{y + BAR - 3}">'
                f"{number}</text>",
            ]
            y += BAR + GAP
        y += GROUP_GAP
    height = y - GROUP_GAP + 16
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Time of a training step; shorter is better</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        '<text class="name" x="16" y="24">Time of a training step; shorter is better</text>',
        *draw_legend(series),
    ]
    return "\n".join([*head, *shapes, "</svg>"]) + "\n"


def draw_legend(series: Sequence[str]) -> Iterator[str]:
    """Yields the shapes that explain the colors, three in a line."""
    for index, name in enumerate(series):
        text, color = SERIES[name]
        x = 16 + index % 3 * 180
        y = 36 + index // 3 * 19
        yield f'<rect class="{color}" x="{x}" y="{y}" width="11" height="11" rx="2"/>'
        yield f'<text class="legend" x="{x + 16}" y="{y + 10}">{text}</text>'
