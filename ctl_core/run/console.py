"""The console output of a run: a live line on a terminal, plain lines elsewhere.

Every message is also written to train.log, through the standard logging module. Values are passed
to the listeners of the run, see run/listeners.py.
"""

from __future__ import annotations

import logging
import math
import operator
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

# A number, as hooks have them: of Python, NumPy or TensorFlow.
Scalar: TypeAlias = Any

LOG = logging.getLogger("ctl_core")
LOG.addHandler(logging.NullHandler())  # without a run, messages go to the console only

PLAIN_INTERVAL = 1.0  # seconds between plain lines for the step alone: a log is no progress bar
LIVE_INTERVAL = 0.1  # between moves of the live line: hooks may show a thousand steps at once
SPEED_INTERVAL = 0.5  # that the speed is measured over, at least
NARROW = 60  # columns of a terminal below which there are only the step and the values


class ListenerGroup(Protocol):
    """The listeners of a run, as run/listeners.py implements them."""

    def tell(self, method: str, *values: Any) -> None:
        """Calls a method of each listener."""


class _Values(ProgressColumn):
    """The values on the progress line, which are cut first if the line is too long."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["values"], no_wrap=True, overflow="ellipsis")


class Console:
    """The console of one run.

    In a cluster, that of the chief is shown; the others only write to their logs.

    Attributes:
        listeners: are passed the values that are shown
    """

    def __init__(self, terminal: Terminal | None = None, shown: bool = True) -> None:
        self.listeners: ListenerGroup | None = None
        self._terminal = terminal or Terminal()
        self._shown = shown
        self._progress: Progress | None = None
        self._step = 0
        self._total = ""
        self._values = ""
        self._speed = ""
        self._clock: Callable[[], float] = time.monotonic
        self._mark = (math.inf, 0)  # seconds and step from which the speed is measured
        self._drawn_at = 0.0
        self._drawn_step = -1
        self._warned: set[str] = set()

    def say(self, text: str) -> None:
        """Prints a line for the user."""
        LOG.info(text)
        self._print(text)

    def warn(self, text: str) -> None:
        """Prints a warning, once."""
        if text not in self._warned:
            self._warned.add(text)
            LOG.warning(text)
            self._print(f"warning: {text}")

    def create_sibling(self) -> Console:
        """Returns a console without listeners that prints where this one prints."""
        return Console(self._terminal, self._shown)

    def start(self, step: int, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins the progress line, on a terminal; speed is measured from here.

        Args:
            step: where training begins
            total: its last step
            clock: gives the seconds that count for the speed
        """
        self._total = f"/{total}"
        self._step = step
        self._clock = clock
        self._mark = (clock(), step)
        if self._shown and self._terminal.is_terminal and not self._terminal.is_dumb_terminal:
            columns: list[ProgressColumn] = [TextColumn("step {task.completed}/{task.total}")]
            if self._terminal.width >= NARROW:
                columns += [BarColumn(bar_width=None), TimeRemainingColumn(compact=True)]
            self._progress = Progress(*columns, _Values(), console=self._terminal, expand=True)
            self._progress.add_task("train", total=total, completed=step, values="")
            self._progress.start()

    def stop(self) -> None:
        """Ends the progress line."""
        if self._progress is not None:
            self._show()
            self._progress.stop()
            self._progress = None

    def step(self, step: int) -> None:
        """Shows that a step is done: on the live line, or as a plain line once a second."""
        self._measure(step)
        pause = PLAIN_INTERVAL
        if self._progress is not None:
            pause = LIVE_INTERVAL
        if step != self._drawn_step and time.monotonic() - self._drawn_at >= pause:
            self._show()

    def values(
        self, step: int, split: str, values: Mapping[str, Scalar | dict[str, Scalar]]
    ) -> None:
        """Shows values of a step, and passes them to the listeners.

        Args:
            step: the number of the step
            split: ``train``, ``eval`` or ``watch``; the folder of the run for TensorBoard
            values: the values by name; those of a dict are shown as ``name/key``
        """
        step = operator.index(step)
        numbers: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, dict):
                for key, scalar in value.items():
                    numbers[f"{name}/{key}".rstrip("/")] = _make_float(scalar)
            else:
                numbers[name.rstrip("/")] = _make_float(value)
        if self.listeners is not None:
            self.listeners.tell("values", step, split, numbers)
        text = format_values(numbers)
        self._measure(step)
        if split == "train":
            self._values = text
            self._show(text)
        else:
            self._show(f"{split}: {text}", is_live=False)

    def _measure(self, step: int) -> None:
        """Notes the step, and how fast the last ones were."""
        self._step = step
        now = self._clock()
        then, first = self._mark
        if now - then >= SPEED_INTERVAL and step > first:
            self._speed = f"{(step - first) / (now - then):.4g} steps/s"
            self._mark = now, step

    def _show(self, text: str = "", is_live: bool = True) -> None:
        """Updates the live line if there is one and ``is_live``; otherwise prints a line."""
        self._drawn_at = time.monotonic()
        self._drawn_step = self._step
        columns = [f"step {self._step}{self._total}", text, self._speed]
        line = "  ".join(column for column in columns if column)
        if self._progress is None or not is_live:
            self.say(line)
            return
        if text:
            LOG.info(line)
        values = f"{self._values}  {self._speed}"
        self._progress.update(self._progress.task_ids[0], completed=self._step, values=values)

    def _print(self, text: str) -> None:
        if self._shown and self._terminal.is_terminal:
            self._terminal.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
        elif self._shown:
            # In one piece: another thread may print, too.
            print(f"{text}\n", end="", file=self._terminal.file, flush=True)


def _make_float(scalar: Scalar) -> float:
    """Returns a number of Python, NumPy or TensorFlow as a float."""
    return float(np.asarray(scalar).item())


def format_values(values: Mapping[str, Any]) -> str:
    """Returns values as a person reads them: ``loss 0.2247  accuracy 0.9499``."""
    return "  ".join(f"{name} {value:.4g}".replace("nan", "NaN") for name, value in values.items())


def format_evaluation(values: Mapping[str, Any], of: int, step: int) -> str:
    """Returns the values of an evaluation as a line.

    Args:
        values: the values by name
        of: the step that was evaluated
        step: the present step of the run; if it is another one, the line names ``of``
    """
    subject = "evaluation"
    if of != step:
        subject += f" of step {of}"
    return f"{subject}: {format_values(values)}"


# A file of TensorFlow's or Keras', not the user's.
_LIBRARY = re.compile(r"[/\\](?:tensorflow|keras)[/\\](?:python|src)[/\\]")


def _only_log(record: logging.LogRecord) -> bool:
    if not _LIBRARY.search(record.pathname):
        return True
    LOG.handle(record)
    return False


def quiet_libraries(quiet: bool) -> None:
    """Sends the log messages of TensorFlow and Keras to train.log only, or to the console again."""
    for name in ("tensorflow", "absl"):
        logger = logging.getLogger(name)
        if quiet:
            logger.addFilter(_only_log)
        else:
            logger.removeFilter(_only_log)


_active: Console | None = None


def activate(console: Console | None) -> Console | None:
    """Makes a console the one that ``report`` and ``show_step`` write to.

    Returns:
        The console that was active before: whoever activates another one puts it back.
    """
    global _active
    before = _active
    _active = console
    return before


def create_console() -> Console:
    """Returns a console for a run that is only read.

    Within a hook of another run, it prints where that run prints: above its progress line, and in a
    cluster on the chief only.
    """
    if _active is None:
        return Console()
    return _active.create_sibling()


def report(step: int, **values: Scalar | dict[str, Scalar]) -> None:
    """For hooks: prints values, writes each as a scalar summary and all to metrics.jsonl.

    Args:
        step: the step that the values belong to
        **values: scalars by name, or dicts of such

    Raises:
        ValueError: a name is that of a key that each line of metrics.jsonl has.
    """
    if "split" in values:
        raise ValueError("ctl.report: 'split' is a key of each line of metrics.jsonl; rename it.")
    (_active or Console()).values(step, "train", values)


def warn(text: str) -> None:
    """Prints a warning, once."""
    (_active or Console()).warn(text)


def show_step(step: int) -> None:
    """For hooks: shows the step on the progress line; without a terminal, a line a second."""
    (_active or Console()).step(step)
