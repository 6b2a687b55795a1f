"""Curves as a picture, by matplotlib: a panel for each metric, the learning rate and the speed.

As a process, ``python -m ctl_core.tools.figure FOLDER`` draws curves.png in the folder of a run.
"""

from __future__ import annotations

import io
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ctl_core.curves_png import CURVES
from ctl_core.errors import SetupError
from ctl_core.files import written_whole
from ctl_core.tools.curves import Curve, Curves, curves_of, differing, value_of
from ctl_core.tools.runs import lasted

# Beyond this ratio of its highest to its lowest value, a loss is drawn on a logarithmic scale.
_LOGARITHMIC = 50
# Columns of a line of the legend, for each panel across.
_COLUMNS = 75
_SPEED = "examples/s"
WORDS = {"examples_per_second": _SPEED}


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


def metrics_of(several: Sequence[Curves]) -> list[str]:
    """Returns the names of the metrics, the loss first."""
    names = dict.fromkeys(name for run in several for _, name in run.values)
    return sorted(names, key=lambda name: name != "loss")


def progress_of(several: Sequence[Curves]) -> list[str]:
    """Returns what is drawn of how runs went: learning rates, then how many examples a second."""
    names = dict.fromkeys(name for run in several for name in run.progress)
    return [
        *(name for name in names if name.partition("/")[0] == "learning_rate"),
        *(name for name in names if name == "examples_per_second"),
    ]


def picture(several: Sequence[Curves], ending: str, title: str | None = None) -> bytes:
    """Draws runs beside each other; the legend says in which settings they differ.

    Args:
        several: the runs
        ending: of the file: png, svg or pdf
        title: of one run, above the panels, in place of its name in the legend

    Raises:
        SetupError: matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ModuleNotFoundError as error:
        raise SetupError(
            "plot: files need matplotlib, which is not installed; in the project's folder: "
            f"{sys.executable} -m pip install --editable '.[plot]'"
        ) from error
    panels = _panels(several)
    across = 1 if len(panels) == 1 else 2
    down = math.ceil(len(panels) / across)
    said = [
        _as_it_is(textwrap.fill(label, _COLUMNS * across, subsequent_indent="    "))
        for label in labels(several)
    ]
    lines = sum(label.count("\n") + 1 for label in said)
    figure = Figure(figsize=(6.4 * across, 3.2 * down + 0.2 * (lines + 1)), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True).flatten()
    colours: list[Any] = [f"C{i}" for i in range(10)]
    if len(several) > len(colours):  # these would come again
        colours = [colormaps["turbo"](i / (len(several) - 1)) for i in range(len(several))]
    styles: dict[str, Any] = {}
    for axis, (name, found) in zip(axes, panels, strict=False):
        heights: list[float] = []
        for index, split, (steps, values) in found:
            drawn = [math.nan if value is None else value for value in values]
            heights += [value for value in drawn if math.isfinite(value)]
            style: Any = {"train": ":", "eval": "-", "": "-"}.get(split, "--")
            marker = "." if len(steps) < 12 else None
            axis.plot(steps, drawn, linestyle=style, marker=marker, color=colours[index])
            if split:
                styles[split] = Line2D([], [], linestyle=style, color="0.3", label=split)
        axis.set_title(_as_it_is(name), fontsize="medium")
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axis.grid(alpha=0.3)
        if name.endswith("loss") and heights and 0 < min(heights) * _LOGARITHMIC < max(heights):
            axis.set_yscale("log")
        elif name == _SPEED or name.startswith("learning_rate"):
            axis.set_ylim(bottom=0)
    for place, axis in enumerate(axes):
        if place >= len(panels):
            axis.set_axis_off()
        elif place + across >= len(panels):  # nothing is below
            axis.set_xlabel("step")
            axis.tick_params(labelbottom=True)
    runs = [
        Line2D([], [], color=colour, label=label)
        for colour, label in zip(colours, [] if title else said, strict=False)
    ]
    figure.legend(
        handles=[*runs, *styles.values()],
        loc="outside lower left",
        fontsize="small",
        frameon=False,
    )
    if title:
        figure.suptitle(title)
    content = io.BytesIO()
    figure.savefig(content, format=ending, dpi=120)
    return content.getvalue()


def _as_it_is(text: str) -> str:
    """Returns a text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")


def _panels(several: Sequence[Curves]) -> list[tuple[str, list[tuple[int, str, Curve]]]]:
    """Returns what is drawn: names, and under each the number of the run, the split, the curve."""

    def measured(name: str) -> Iterator[tuple[int, str, Curve]]:
        for index, run in enumerate(several):
            for (split, each), curve in run.values.items():
                if each == name:
                    yield index, split, curve

    panels = [(name, [*measured(name)]) for name in metrics_of(several)]
    for name in progress_of(several):
        of_runs = [
            (index, "", run.progress[name])
            for index, run in enumerate(several)
            if name in run.progress
        ]
        panels.append((WORDS.get(name, name), of_runs))
    return panels


def main(folder: str) -> int:
    """Draws the curves of a run into its folder, if it has measured anything."""
    try:
        run = curves_of(Path(folder))
    except SetupError:
        return 0
    words = [run.name, f"step {run.found.step}"]
    words += [] if run.seconds is None else [f"{lasted(run.seconds)} trained"]
    content = picture([run], "png", ", ".join(words))
    with written_whole(Path(folder) / CURVES) as beside:
        beside.write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
