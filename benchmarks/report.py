"""What was measured, as tables, as goals that are reached or not, and as JSON.

Ratios are taken round by round, of what was timed right after one another; the report has their
median. Nothing here needs TensorFlow.
"""

from __future__ import annotations

import dataclasses
import io
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

MIB = 2**20
COMPILED = "engine, compiled"
IN_GRAPH, ALL_REDUCE, SHARE = "textbook loop in the graph", "all-reduce alone", "share alone"
TRAIN_SH = "engine, by train.sh"
JAX_FIT, JAX_SCAN = "Keras fit on JAX", "JAX scan"
SAVING, TEXTBOOK_SAVING = (
    f"{peer}, saving every 100 steps" for peer in ("engine", "textbook loop")
)
OURS = ("engine", COMPILED, TRAIN_SH, SAVING)
PARTS = ("floor", "input alone", ALL_REDUCE, SHARE)  # not a whole training each
# Workloads on which compiled stretches are timed, and how much faster than the best of Keras' fit
# they have to be.
REPORTED_COMPILED = {"mlp": 4.0, "lstm": 2.0, "transformer": 2.0, "embedding": 1.5}


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one peer took for one section.

    Attributes:
        section: a workload, or what else was timed
        devices: replicas
        every: the loss was read on the host so often, in steps; 0: never
        peer: who
        seconds: of a step, a batch or a start; one for each round
        memory: the most that the process used, MiB, where it had a process of its own
        failure: why there is no time
    """

    section: str
    devices: int
    every: int
    peer: str
    seconds: list[float]
    memory: float | None = None
    failure: str | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        """What has to be the same for a comparison."""
        return self.section, self.devices, self.every


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of a process that trains, MiB, before and after so many steps and checkpoints."""

    steps: int
    checkpoints: int
    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class Goal:
    """What the engine has to reach: a ratio, at least or at most ``needed``.

    Attributes:
        text: what is compared
        ratios: one for each round
        needed: the goal
        at_most: whether less is better
    """

    text: str
    ratios: list[float]
    needed: float
    at_most: bool = False

    @property
    def measured(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def reached(self) -> bool:
        """Whether the median is on the right side, as it is printed: to two decimal places."""
        measured = round(self.measured, 2)
        return measured <= self.needed if self.at_most else measured >= self.needed


class Results:
    """All that was measured."""

    def __init__(self, timings: Iterable[Timing], memory: Memory | None = None) -> None:
        self.timings = list(timings)
        self.memory = memory

    def seconds(self, section: str, devices: int, every: int, peer: str) -> list[float]:
        """One peer's times by round; none if it was not measured."""
        for timing in self.timings:
            if (*timing.key, timing.peer) == (section, devices, every, peer):
                return timing.seconds
        return []

    def ratios(self, key: tuple[str, int, int], peer: str) -> list[float]:
        """How much longer the peer took than the engine, by round."""
        pairs = zip(self.seconds(*key, peer), self.seconds(*key, "engine"), strict=False)
        return [theirs / ours for theirs, ours in pairs]

    def goals(self) -> list[Goal]:
        """The goals for which everything was measured."""
        return [goal for goal in self._goals() if goal.ratios]

    def _goals(self) -> Iterable[Goal]:
        mlp, each = ("mlp", 1, 50), ("mlp", 1, 1)
        yield Goal("mlp: Keras fit / engine", self.ratios(mlp, "Keras fit"), 4.0)
        many = "Keras fit, many steps a call"
        yield Goal(f"mlp: {many} / engine", self.ratios(mlp, many), 1.1)
        parts = (self.seconds(*mlp, peer) for peer in ("engine", "floor", "input alone"))
        above = [ours / (floor + data) for ours, floor, data in zip(*parts, strict=False)]
        yield Goal("mlp: engine / (floor + input alone)", above, 1.15, at_most=True)
        yield Goal(
            "mlp, a hook every step: Keras fit / engine", self.ratios(each, "Keras fit"), 1.5
        )
        yield Goal(
            "mlp, a hook every step: textbook loop / engine",
            self.ratios(each, "textbook loop"),
            1.1,
        )
        for name, needed in REPORTED_COMPILED.items():
            key = (name, 1, 50)
            theirs, ours = self.seconds(*key, many), self.seconds(*key, COMPILED)
            ratios = [one / other for one, other in zip(theirs, ours, strict=False)]
            yield Goal(f"{name}: {many} / {COMPILED}", ratios, needed)
        ours = self.seconds(*mlp, COMPILED)
        ratios = [a / b for a, b in zip(self.seconds(*mlp, JAX_FIT), ours, strict=False)]
        yield Goal(f"mlp: {JAX_FIT} / {COMPILED}", ratios, 5.0)
        ratios = [b / a for a, b in zip(self.seconds(*mlp, JAX_SCAN), ours, strict=False)]
        yield Goal(f"mlp: {COMPILED} / {JAX_SCAN}", ratios, 3.5, at_most=True)
        yield Goal(f"embedding: {many} / engine", self.ratios(("embedding", 1, 50), many), 1.0)
        for name in ("cnn", "vgg"):
            for devices in (1, 2, 4):
                peer, ratios = self._best_peer((name, devices, 50))
                on = f" on {devices} devices" if devices > 1 else ""
                yield Goal(f"{name}{on}: best peer ({peer}) / engine", ratios, 0.98)
        for name in ("mlp", "cnn"):
            for devices in (2, 4):
                ratios = self.ratios((name, devices, 50), "textbook loop")
                yield Goal(f"{name} on {devices} devices: textbook loop / engine", ratios, 1.5)
        two = ("mlp, 2 processes", 2, 0)
        for peer, needed in (("textbook loop", 2.5), (IN_GRAPH, 1.4)):
            yield Goal(f"mlp, 2 processes: {peer} / engine", self.ratios(two, peer), needed)
        parts = (self.seconds(*two, peer) for peer in ("engine", ALL_REDUCE, SHARE))
        above = [ours / (reduce + step) for ours, reduce, step in zip(*parts, strict=False)]
        text = f"mlp, 2 processes: engine / ({ALL_REDUCE} + {SHARE})"
        yield Goal(text, above, 1.15, at_most=True)
        inverse = [1 / ratio for ratio in self.ratios(("images", 1, 50), "input alone")]
        yield Goal("images: engine / input alone", inverse, 1.05, at_most=True)
        inverse = [1 / ratio for ratio in self.ratios(("first step", 1, 0), "Keras fit")]
        yield Goal("first step: engine / Keras fit", inverse, 1.1, at_most=True)
        key = ("first step", 1, 0)
        theirs, ours = self.seconds(*key, "Keras fit"), self.seconds(*key, TRAIN_SH)
        ratios = [one / other for one, other in zip(ours, theirs, strict=False)]
        yield Goal("first step: train.sh / Keras fit", ratios, 1.1, at_most=True)
        if self.memory is not None:
            grown = [self.memory.after / self.memory.before]
            text = f"memory after {self.memory.steps} steps / before"
            yield Goal(text, grown, 1.02, at_most=True)
        saving = self.ratios(("checkpoints of cnn", 1, 50), SAVING)
        yield Goal("cnn: a checkpoint every 100 steps / none", saving, 1.05, at_most=True)
        for name in ("mlp", "cnn"):
            ratios = self.ratios((f"evaluation of {name}", 1, 0), "Keras evaluate")
            yield Goal(f"evaluation of {name}: Keras evaluate / engine", ratios, 1.0)

    def _best_peer(self, key: tuple[str, int, int]) -> tuple[str, list[float]]:
        """Returns the peer with the lowest median, and its ratios."""
        peers = [t.peer for t in self.timings if t.key == key and t.seconds and is_peer(t.peer)]
        if not peers:
            return "", []
        best = min(peers, key=lambda peer: statistics.median(self.seconds(*key, peer)))
        return best, self.ratios(key, best)

    def as_json(self) -> dict[str, Any]:
        """Everything, with the ratios' medians and the goals."""
        timings = []
        for timing in self.timings:
            ratios = self.ratios(timing.key, timing.peer)
            ratio = statistics.median(ratios) if ratios else None
            timings.append({**dataclasses.asdict(timing), "ratio_to_engine": ratio})
        goals = [
            {**dataclasses.asdict(goal), "measured": goal.measured, "reached": goal.reached}
            for goal in self.goals()
        ]
        memory = dataclasses.asdict(self.memory) if self.memory else None
        return {"timings": timings, "memory": memory, "goals": goals}


def is_peer(name: str) -> bool:
    """Whether this trains on TensorFlow, from data that it has to read."""
    return name not in (*OURS, *PARTS, JAX_FIT, JAX_SCAN)


def put_into(file: Path, results: Results, notes: Iterable[str]) -> None:
    """Puts the tables into a Markdown file, in place of its last block of text."""
    with io.StringIO() as said:
        print_report(results, Console(file=said, width=160), notes)
        lines = [line.rstrip() for line in said.getvalue().splitlines()]
    before, fence, _ = file.read_text(encoding="utf-8").rpartition("```text\n")
    if not fence:
        raise SystemExit(f"error: {file}: expected a block that begins with ```text")
    report = "\n".join(line for line in lines if line)
    file.write_text(f"{before}{fence}{report}\n```\n", encoding="utf-8")


def print_report(results: Results, console: Console, notes: Iterable[str] = ()) -> None:
    """Prints the tables."""
    # In a pipe no lines, and a width that wraps nothing.
    form: dict[str, Any] = {
        "title_justify": "left",
        "box": box.SQUARE if console.is_terminal else box.SIMPLE,
    }
    table = Table("section", "devices", "loss read", "who", title="Time", **form)
    for name in ("median", "quartiles", "ratio to engine", "memory"):
        table.add_column(name, justify="right")
    before = None
    for timing in results.timings:
        if before not in (None, timing.key):
            table.add_section()
        head = (timing.section, str(timing.devices), f"every {timing.every}" * (timing.every > 0))
        table.add_row(*(head if before != timing.key else ("", "", "")), *_cells(results, timing))
        before = timing.key
    console.print(table)
    if results.memory is not None:
        memory = results.memory
        console.print(
            f"memory of a run: {memory.before:.0f} MiB, and {memory.after:.0f} MiB after another "
            f"{memory.steps} steps and {memory.checkpoints} checkpoints"
        )
    table = Table("goal", title="Goals", **form)
    for name in ("needed", "measured", "rounds", ""):
        table.add_column(name, justify="right")
    for goal in results.goals():
        table.add_row(
            goal.text,
            f"{'≤' if goal.at_most else '≥'} {goal.needed:.2f}",
            f"{goal.measured:.2f}",
            _range(goal.ratios, lambda ratio: f"{ratio:.2f}"),
            "reached" if goal.reached else "not reached",
        )
    if table.row_count:
        console.print(table)
    for note in notes:
        console.print(note)


def _cells(results: Results, timing: Timing) -> list[str]:
    if timing.failure is not None:
        return [timing.peer, "fails", timing.failure, "", ""]
    ratio = statistics.median(results.ratios(timing.key, timing.peer) or [float("nan")])
    ahead = timing.peer not in (*OURS, *PARTS) and round(ratio, 2) < 1
    written = _seconds if timing.section == "first step" else _microseconds
    return [
        timing.peer,
        written(statistics.median(timing.seconds)),
        _range(timing.seconds, written),
        f"{'quicker: ' * ahead}{ratio:.2f}",
        f"{timing.memory:.0f} MiB" if timing.memory else "",
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _microseconds(value: float) -> str:
    return f"{value * 1e6:.0f} µs"


def _range(values: list[float], form: Callable[[float], str]) -> str:
    """The lower and the upper quartile."""
    if len(values) < 2:
        return ""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{form(low)} – {form(high)}"


def memory_used() -> float:
    """What this process holds in memory now, MiB."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return memory_peak()
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def memory_peak() -> float:
    """The most that this process has held in memory, MiB."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024
