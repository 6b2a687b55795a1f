"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere.

Every message also goes to train.log, by way of the standard logging module. What is written to
metrics.jsonl and TensorBoard is the part of listeners, see run/listeners.py.
"""

from __future__ import annotations

import logging
import operator
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Console as Terminal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

LOG = logging.getLogger("ctl_core")
LOG.addHandler(logging.NullHandler())  # without a run, messages go to the console only

# A plain line for the step alone, at most so often (seconds): a log is no progress bar.
PLAIN_INTERVAL = 1.0
# The speed shown is measured over the last seconds, at least so many.
SPEED_INTERVAL = 0.5
# Columns of a terminal below which the progress line is only the step and the values.
NARROW = 60


class _Values(ProgressColumn):
    """The values on the progress line: what is cut first where the line is too long."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["values"], no_wrap=True, overflow="ellipsis")


class Console:
    """The console of one run.

    In a cluster, that of the chief is shown; the others only write to their logs.

    Attributes:
        total: the last step of the run, for the progress line
        listeners: called with (step, split, values) for whatever is reported
    """

    def __init__(self, terminal: Terminal | None = None, shown: bool = True) -> None:
        self.total: int | None = None
        self.listeners: list[Callable[[int, str, dict[str, float]], None]] = []
        self._terminal = terminal or Terminal()
        self._shown = shown
        self._progress: Progress | None = None
        self._values = ""
        self._speed = ""
        self._clock: Callable[[], tuple[float, int]] = lambda: (time.monotonic(), 0)
        self._marks: deque[tuple[float, int]] = deque()  # seconds and step
        self._traced = 0
        self._printed_at = 0.0
        self._printed_step = -1
        self._warned: set[str] = set()

    def say(self, text: str) -> None:
        """Prints a line for the user."""
        LOG.info(text)
        self._print(text)

    def warn(self, text: str) -> None:
        """Prints a line about something that goes on, but not as the user may expect."""
        LOG.warning(text)
        self._print(f"warning: {text}")

    def warn_once(self, text: str) -> None:
        """Warns, unless this has been said before."""
        if text not in self._warned:
            self._warned.add(text)
            self.warn(text)

    def answer(self, text: str) -> None:
        """Prints a line for who sits at this process's terminal, also where others are not shown.

        May be called in any thread.
        """
        LOG.info(text)
        self._print(text, shown=self._shown or self._terminal.is_terminal)

    def start(
        self, step: int, total: int, clock: Callable[[], tuple[float, int]] | None = None
    ) -> None:
        """Begins the progress line, on a terminal; speed is measured from here.

        Args:
            step: where training begins
            total: its last step
            clock: gives the seconds that count for the speed, and how many graph functions were
                traced, which is no part of it; without one, all seconds count
        """
        self.total = total
        self._clock = clock or self._clock
        self._marks.clear()
        self._measure(step)
        if self._shown and self._terminal.is_terminal and not self._terminal.is_dumb_terminal:
            columns: list[ProgressColumn] = [TextColumn("step {task.completed}/{task.total}")]
            if self._terminal.width >= NARROW:
                columns += [BarColumn(bar_width=None), _Values()]
                columns += [TextColumn("{task.fields[speed]}"), TimeRemainingColumn(compact=True)]
            else:
                columns += [_Values()]
            self._progress = Progress(*columns, console=self._terminal, expand=True)
            self._progress.add_task("train", total=total, completed=step, values="", speed="")
            self._progress.start()

    def stop(self) -> None:
        """Ends the progress line."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def step(self, step: int) -> None:
        """Shows that a step is done: on the live line, or as a plain line once a second."""
        now = time.monotonic()
        self._measure(step)
        if self._progress is not None:
            self._update(step)
        elif now - self._printed_at >= PLAIN_INTERVAL and step != self._printed_step:
            self._line(step, "", now)

    def values(self, step: int, split: str, values: dict[str, Any]) -> None:
        """Shows values measured at a step and hands them to the listeners.

        Args:
            step: the step
            split: train or eval
            values: scalars by name; of a dict in it, each value is shown as ``name/key``

        Raises:
            TypeError: the step is no whole number.
            ValueError: a value is no scalar, or has the name of something else.
        """
        step = operator.index(step)
        numbers = {name: _scalar(name, value) for name, value in _flat(values)}
        for listener in self.listeners:
            listener(step, split, numbers)
        text = format_values(numbers)
        now = time.monotonic()
        self._measure(step)
        if split == "train":
            self._values = text
        if self._progress is not None and split == "train":
            LOG.info("step %d  %s", step, text)
            self._update(step)
        else:
            self._line(step, text if split == "train" else f"{split}: {text}", now)

    def _line(self, step: int, text: str, now: float) -> None:
        total = f"/{self.total}" if self.total is not None else ""
        parts = [f"step {step}{total}", text, self._speed]
        self._printed_at, self._printed_step = now, step
        self.say("  ".join(part for part in parts if part))

    def _measure(self, step: int) -> None:
        now, traced = self._clock()
        if traced != self._traced:  # which took most of the time since the last mark
            self._traced = traced
            self._marks.clear()
        marks = self._marks
        if not marks or step > marks[-1][1]:
            marks.append((now, step))
        while len(marks) > 2 and now - marks[1][0] >= SPEED_INTERVAL:
            marks.popleft()
        then, first = marks[0]
        if now - then >= SPEED_INTERVAL and step > first:
            self._speed = f"{(step - first) / (now - then):.4g} steps/s"

    def _update(self, step: int) -> None:
        assert self._progress is not None
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=step, values=self._values, speed=self._speed)

    def _print(self, text: str, shown: bool | None = None) -> None:
        if not (self._shown if shown is None else shown):
            return
        if self._terminal.is_terminal:
            self._terminal.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
        else:
            # In one piece: another thread may print, too.
            print(f"{text}\n", end="", file=self._terminal.file, flush=True)


def format_values(values: Mapping[str, Any]) -> str:
    """Returns values as a person reads them: ``loss 0.2247  accuracy 0.9499``."""
    return "  ".join(f"{name} {value:.4g}".replace("nan", "NaN") for name, value in values.items())


def format_evaluation(values: Mapping[str, Any], of: int, step: int) -> str:
    """Returns the values of an evaluation with its step, where that is another than the run's.

    Args:
        values: of the evaluation
        of: the step that it is of
        step: that the run has come to
    """
    return f"evaluation{f' of step {of}' * (of != step)}: {format_values(values)}"


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields name and value, of a dict of values (one for each objective, say) each."""
    for name, value in values.items():
        if name in ("step", "split"):
            raise ValueError(f"a value cannot be called {name}: metrics.jsonl has one already")
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", part) for key, part in value.items())
        else:
            yield name, value


def _scalar(name: str, value: Any) -> float:
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(f"{name} must be a scalar, got shape {list(array.shape)}")
    try:
        return float(array.reshape(()))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None


# A file of TensorFlow's or Keras', not the user's.
_LIBRARY = re.compile(r"[/\\](?:tensorflow|keras)[/\\](?:python|src)[/\\]")


def _only_log(record: logging.LogRecord) -> bool:
    if not _LIBRARY.search(record.pathname):
        return True
    LOG.handle(record)
    return False


def quiet_libraries(quiet: bool) -> None:
    """Lets what TensorFlow and Keras log, for people who know them well, go to train.log only."""
    for name in ("tensorflow", "absl"):
        logger = logging.getLogger(name)
        if quiet:
            logger.addFilter(_only_log)
        else:
            logger.removeFilter(_only_log)


_active: Console | None = None


def activate(console: Console | None) -> None:
    """Makes a console the one that ``report`` and ``show_step`` write to."""
    global _active
    _active = console


def report(step: int, **values: Any) -> None:
    """For hooks: prints values, writes each as a scalar summary and all to metrics.jsonl.

    Args:
        step: the step they belong to
        **values: scalars by name, or dicts of such

    Raises:
        ValueError: a value is no scalar.
    """
    (_active or Console()).values(step, "train", values)


def warn(text: str, once: bool = False) -> None:
    """Prints a line about something that goes on, but not as the user may expect."""
    console = _active or Console()
    (console.warn_once if once else console.warn)(text)


def show_step(step: int) -> None:
    """For hooks: shows the step on the progress line; without a terminal, a line a second."""
    (_active or Console()).step(step)
