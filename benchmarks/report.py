"""Formats the measurements as tables, and compares them with goals.

Goals are ratios of two times. A ratio is computed for each round, from times that were measured
shortly after one another; the report shows the median of these ratios. TensorFlow is not imported
here.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

FIT = "Keras fit"
MANY = "Keras fit, many steps"
TEXTBOOK = "textbook loop"
COMPILED = "engine, compiled"
# Only measured on a GPU, where the engine compiles by default.
UNCOMPILED = "engine, uncompiled"
SAVING = "engine, saving"
# Only measured in sections of their own, in which all peers are deterministic.
LOGICAL = "engine, logical replicas"
MICRO_BATCHES = "engine, micro-batches"
# Only measured in a section of its own.
SHARDS = "engine, shards"
FLOOR = "floor"
INPUT = "input alone"
IN_GRAPH = "textbook loop in the graph"
# Only measured in a section of their own, whose input takes long: a single process, and processes
# that each prepare every example.
ALONE = "engine, 1 process"
WHOLE_INPUT = "engine, whole input"
EVALUATE = "Keras evaluate"
EVALUATE_MANY = "Keras evaluate, many steps"
OURS = (
    "engine",
    COMPILED,
    UNCOMPILED,
    SAVING,
    LOGICAL,
    MICRO_BATCHES,
    SHARDS,
    ALONE,
    WHOLE_INPUT,
)
# A process that only imports TensorFlow and Keras, which is a part of the time of a first step.
IMPORTS = "imports alone"
PARTS = (FLOOR, INPUT, IMPORTS)  # each is only a part of training
BEST = "best peer"
# The columns of the table of times. In each section, a column shows that one of its peers that was
# measured there.
COLUMNS = {
    "engine": ("engine",),
    "compiled": (COMPILED,),
    "uncompiled": (UNCOMPILED,),
    "saving": (SAVING,),
    "4 logical": (LOGICAL,),
    "4 micro": (MICRO_BATCHES,),
    "shards": (SHARDS,),
    "1 process": (ALONE,),
    "whole input": (WHOLE_INPUT,),
    "Keras": (FIT, EVALUATE),
    "many steps": (MANY, EVALUATE_MANY),
    "textbook loop": (TEXTBOOK,),
    "loop in graph": (IN_GRAPH,),
    FLOOR: (FLOOR, IMPORTS),
    INPUT: (INPUT,),
}
# The line before the table of times.
TITLE = "Times in microseconds per step; the first step in seconds"
Key = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of one peer in one section.

    Attributes:
        section: the name of the workload, or of another measurement
        devices: the number of devices
        every: the number of steps after which the loss is read on the host; 0: never
        peer: the name of the peer
        seconds: the time of a step, a batch or a start, for each round
    """

    section: str
    devices: int
    every: int
    peer: str
    seconds: list[float]

    @property
    def key(self) -> Key:
        """The attributes that two times must have in common to be compared."""
        return self.section, self.devices, self.every


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a process that trains, in MiB.

    Attributes:
        steps: the number of steps between the two measurements
        checkpoints: the number of checkpoints between the two measurements
        before: the memory at the first measurement
        after: the memory at the second measurement
    """

    steps: int
    checkpoints: int
    before: float
    after: float


class Goal(NamedTuple):
    """A ratio of times that the engine should reach.

    Attributes:
        key: the section, the number of devices, and the steps between two reads of the loss
        above: the peers whose times are added up in the numerator
        below: the peers whose times are added up in the denominator
        needed: the minimum of the ratio, or the maximum if ``at_most`` is true
    """

    key: Key
    above: tuple[str, ...]
    below: tuple[str, ...]
    needed: float
    at_most: bool = False

    def __str__(self) -> str:
        section, devices, every = self.key
        where = f" on {devices} devices" if devices > 1 and "processes" not in section else ""
        often = ", a hook every step" if every == 1 and section == "mlp" else ""
        sides = (" + ".join(side) for side in (self.above, self.below))
        above, below = (f"({side})" if " + " in side else side for side in sides)
        return f"{section}{where}{often}: {above} / {below}"


ENGINE = ("engine",)
CLUSTER: Key = ("mlp, 2 processes", 2, 0)
OWN_ROWS: Key = ("input of 2 ms, 2 processes", 2, 0)
START: Key = ("first step", 1, 0)
START_OF_TRANSFORMER = "20 steps of a new process, transformer"
GOALS = [
    Goal(("mlp", 1, 50), (FIT,), ENGINE, 4.5),
    Goal(("mlp", 1, 50), (MANY,), ENGINE, 1.1),
    Goal(("mlp", 1, 50), ENGINE, (FLOOR, INPUT), 1.05, at_most=True),
    Goal(("mlp", 1, 1), (FIT,), ENGINE, 1.5),
    Goal(("mlp", 1, 1), (TEXTBOOK,), ENGINE, 1.1),
    Goal(("mlp", 1, 50), (MANY,), (COMPILED,), 5.5),
    Goal(("lstm", 1, 50), (MANY,), (COMPILED,), 4.0),
    Goal(("transformer", 1, 50), (MANY,), (COMPILED,), 2.0),
    Goal(("embedding", 1, 50), (MANY,), (COMPILED,), 4.2),
    Goal(("embedding", 1, 50), (MANY,), ENGINE, 1.0),
    # The bare loop takes 0.97 of the engine's time here: all peers compute the same convolutions.
    Goal(("cnn", 1, 50), (BEST,), ENGINE, 0.97),
    Goal(("cnn", 1, 50), ENGINE, (FLOOR,), 1.06, at_most=True),
    *(Goal(("cnn", devices, 50), (BEST,), ENGINE, 1.05) for devices in (2, 4)),
    *(Goal(("mlp", devices, 50), (TEXTBOOK,), ENGINE, 4.5) for devices in (2, 4)),
    *(Goal(("cnn", devices, 50), (TEXTBOOK,), ENGINE, 1.6) for devices in (2, 4)),
    Goal(CLUSTER, (TEXTBOOK,), ENGINE, 2.6),
    Goal(CLUSTER, (IN_GRAPH,), ENGINE, 1.6),
    Goal(OWN_ROWS, (ALONE,), ENGINE, 1.8),
    Goal(OWN_ROWS, (ALONE,), (WHOLE_INPUT,), 1.1, at_most=True),
    Goal(("images", 1, 50), ENGINE, (INPUT,), 1.05, at_most=True),
    # The imports, which are part of both times, take three quarters of the time of ``fit``.
    Goal(START, ENGINE, (FIT,), 0.95, at_most=True),
    Goal((START_OF_TRANSFORMER, 1, 0), (FIT,), ENGINE, 1.4),
    Goal((START_OF_TRANSFORMER, 4, 0), (FIT,), ENGINE, 2.0),
    Goal(("checkpoints of cnn", 1, 50), (SAVING,), ENGINE, 1.06, at_most=True),
    Goal(("cnn, exact", 4, 50), (LOGICAL,), ENGINE, 1.25, at_most=True),
    Goal(("cnn, exact", 1, 50), (LOGICAL,), (MICRO_BATCHES,), 1.1, at_most=True),
    *(
        Goal((f"{name}, Adam", 4, 50), (SHARDS,), ENGINE, 1.1, at_most=True)
        for name in ("mlp", "transformer")
    ),
    Goal(("evaluation of mlp", 1, 0), (EVALUATE,), ENGINE, 4.5),
    Goal(("evaluation of cnn", 1, 0), (EVALUATE,), ENGINE, 1.9),
]
# On a GPU, Keras compiles all models except the LSTM by default, as the engine does.
GPU_GOALS = [
    *(Goal((name, 1, 50), (MANY,), ENGINE, 4.0) for name in ("mlp", "transformer")),
    Goal(("cnn", 1, 50), (MANY,), ENGINE, 3.5),
    Goal(("embedding", 1, 50), (MANY,), ENGINE, 1.0),
    Goal(("mlp", 1, 1), (FIT,), ENGINE, 1.0),
    *(
        Goal((f"{name}, mixed_float16", 1, 50), (MANY,), (COMPILED,), 1.0)
        for name in ("mlp", "cnn", "transformer")
    ),
    Goal(("images", 1, 50), ENGINE, (INPUT,), 1.05, at_most=True),
    Goal(START, ENGINE, (FIT,), 0.95, at_most=True),
    Goal(("checkpoints of cnn", 1, 50), (SAVING,), ENGINE, 1.06, at_most=True),
    *(Goal((f"evaluation of {name}", 1, 0), (EVALUATE,), ENGINE, 1.0) for name in ("mlp", "cnn")),
]


class Reached(NamedTuple):
    """A goal with its measured ratios.

    Attributes:
        text: a description of the goal
        ratios: the ratio of each round
        needed: the minimum of the median ratio, or the maximum if ``at_most`` is true
    """

    text: str
    ratios: list[float]
    needed: float
    at_most: bool

    @property
    def measured(self) -> float:
        return statistics.median(self.ratios)

    @property
    def reached(self) -> bool:
        """True if the median, rounded to two decimal places as it is printed, reaches the goal."""
        measured = round(self.measured, 2)
        return measured <= self.needed if self.at_most else measured >= self.needed


class Results:
    """All measurements, and the goals for them."""

    def __init__(
        self,
        timings: Iterable[Timing],
        memory: Memory | None = None,
        wanted: Iterable[Goal] = GOALS,
    ) -> None:
        self.timings = list(timings)
        self.memory = memory
        self._wanted = list(wanted)

    def seconds(self, key: Key, *peers: str) -> list[float]:
        """Returns the sum of the peers' times for each round; [] if a peer was not measured."""
        seconds_by_peer = {
            timing.peer: timing.seconds for timing in self.timings if timing.key == key
        }
        rounds = zip(*(seconds_by_peer.get(peer, []) for peer in peers), strict=False)
        return [sum(of_round) for of_round in rounds]

    def ratios(self, key: Key, above: Iterable[str], below: Iterable[str]) -> list[float]:
        """Returns for each round the time of ``above`` divided by the time of ``below``."""
        pairs = zip(self.seconds(key, *above), self.seconds(key, *below), strict=False)
        return [numerator / other for numerator, other in pairs]

    def goals(self) -> Iterator[Reached]:
        """Yields the goals for which all times were measured."""
        for goal in self._wanted:
            text = str(goal)
            if goal.above == (BEST,):
                best = self._find_best(goal.key)
                goal = goal._replace(above=(best,))
                text = text.replace(BEST, f"{BEST} ({best})")
            if ratios := self.ratios(goal.key, goal.above, goal.below):
                yield Reached(text, ratios, goal.needed, goal.at_most)
        if self.memory is not None:
            text = f"memory after {self.memory.steps} steps / before"
            yield Reached(text, [self.memory.after / self.memory.before], 1.02, True)

    def _find_best(self, key: Key) -> str:
        """Returns the fastest peer, except the engine and the peers that do a part of training."""
        medians = {
            timing.peer: statistics.median(timing.seconds)
            for timing in self.timings
            if timing.key == key and timing.seconds and timing.peer not in (*OURS, *PARTS)
        }
        return min(medians, key=medians.__getitem__, default="")


def print_report(
    results: Results, console: Console, notes: Iterable[str] = (), all_goals: bool = True
) -> None:
    """Prints a line of times for each section, and the goals.

    Args:
        results: the measurements
        console: where to print
        notes: lines to print at the end
        all_goals: whether to print all goals, or only those that were missed
    """
    console.print(TITLE)
    table = Table("section", "devices", "read every", box=box.SIMPLE)
    measured = {timing.peer for timing in results.timings}
    columns = {name: peers for name, peers in COLUMNS.items() if measured.intersection(peers)}
    for name in columns:
        table.add_column(name, justify="right")
    for key in dict.fromkeys(timing.key for timing in results.timings):
        cells = [_cell(results, key, peers) for peers in columns.values()]
        table.add_row(key[0], str(key[1]), str(key[2] or ""), *cells)
    console.print(table)
    if memory := results.memory:
        console.print(
            f"memory of a run: {memory.before:.0f} MiB at the first measurement, and "
            f"{memory.after:.0f} MiB at the second measurement, which was {memory.steps} steps and "
            f"{memory.checkpoints} checkpoints later"
        )
    goals = list(results.goals())
    table = Table("goal", box=box.SIMPLE)
    for name in ("needed", "measured", "rounds", ""):
        table.add_column(name, justify="right")
    for goal in goals:
        if all_goals or not goal.reached:
            table.add_row(
                goal.text,
                f"{'≤' if goal.at_most else '≥'}{goal.needed:.2f}",
                f"{goal.measured:.2f}",
                _range(goal.ratios),
                "" if goal.reached else "missed",
            )
    if goals:
        console.print(f"Goals: {sum(goal.reached for goal in goals)} of {len(goals)} reached")
        console.print(table)
    for note in notes:
        console.print(note)


def _cell(results: Results, key: Key, peers: Iterable[str]) -> str:
    """Returns the median of a peer's times: in seconds above 0.1 s, otherwise in microseconds."""
    medians = [
        statistics.median(seconds) for peer in peers if (seconds := results.seconds(key, peer))
    ]
    return "".join(f"{m:.2f}" if m > 0.1 else f"{m * 1e6:.0f}" for m in medians)


def _range(values: list[float]) -> str:
    """Returns the lower and the upper quartile."""
    if len(values) < 2:
        return ""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:.2f}–{high:.2f}"
