"""The console output of a run: a live line on a terminal, plain lines elsewhere.

The engine updates the live line after each graph call, even if no hook reports anything. Every
message is also written to train.log through the standard logging module. The progress line is
written there every ten seconds. Values are passed to the listeners of the run, see
run/listeners.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from rich.console import Console as Terminal
from rich.progress import Progress

from ctl_core.run.output import escape_missing_letters
from ctl_core.run.progress import MOST_VALUES, LineColumn, ProgressLine, SpeedMeter, format_seconds

# A number that a hook passes: a Python number, or a scalar of NumPy or TensorFlow.
Scalar: TypeAlias = Any

LOG = logging.getLogger("ctl_core")
LOG.addHandler(logging.NullHandler())  # without a run, messages go to the console only

# The number of seconds between two progress lines in a log; see the setting ``log_seconds``.
LOG_SECONDS = 10.0
# The minimum number of seconds between the last line and a line of ``show_step``, or the line that
# reports a checkpoint.
STEP_SECONDS = 1.0
# The minimum number of training seconds over which the speed on the live line is measured.
SPEED_SECONDS = 1.0


class ListenerGroup(Protocol):
    """The listeners of a run, as run/listeners.py implements them."""

    def tell(self, method: str, *values: Any) -> None:
        """Calls a method of each listener."""


class Console:
    """The console of one run.

    In a cluster, only the chief's console prints; the other processes only write to their logs.

    Attributes:
        listeners: the listeners of the run, which receive all values
        read_rates: returns the learning rates, which the listeners receive together with the values
            of a training step
    """

    def __init__(self, terminal: Terminal | None = None, shown: bool = True) -> None:
        self.listeners: ListenerGroup | None = None
        self.read_rates: Callable[[], dict[str, float]] = dict
        escape_missing_letters(sys.stdout)
        self._terminal = terminal or Terminal()
        self._shown = shown
        self._progress: Progress | None = None
        self._meter: SpeedMeter | None = None
        self._log_seconds = LOG_SECONDS
        self._steps_per_epoch: int | None = None
        self._start = 0
        self._passes = 0.0
        self._step = 0
        self._total = 0
        self._values: dict[str, float] = {}
        # The time and the step of the last line that was printed or logged.
        self._printed_at = 0.0
        self._printed_step = -1
        self._is_deferred = False
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
        """Returns a console without listeners that prints to the same terminal as this one."""
        return Console(self._terminal, self._shown)

    def start(
        self,
        step: int,
        total: int,
        clock: Callable[[], float] = time.monotonic,
        steps_per_epoch: int | None = None,
        log_seconds: float = LOG_SECONDS,
        passes: float = 0.0,
    ) -> None:
        """Begins the progress line.

        Args:
            step: the step at which training begins
            total: the last step of training
            clock: returns the seconds of training, without evaluations and checkpoints
            steps_per_epoch: the number of steps of an epoch; None if the line shows no epoch
            log_seconds: the number of seconds between two lines in the log; without a terminal,
                also between two lines in the output
            passes: the number of epochs before ``step``
        """
        self._start = self._step = step
        self._total = total
        self._meter = SpeedMeter(step, total, clock)
        self._steps_per_epoch = steps_per_epoch
        self._passes = passes
        self._log_seconds = log_seconds
        self._printed_at = time.monotonic()
        if self._shown and self._terminal.is_terminal and not self._terminal.is_dumb_terminal:
            column = LineColumn(self._terminal, self._make_line)
            self._progress = Progress(
                column, console=self._terminal, expand=True, refresh_per_second=2
            )
            self._progress.add_task("train", total=total, completed=step)
            self._progress.start()

    def advance(self, step: int, is_warm: bool = True) -> None:
        """Records the last step of a graph call; the engine calls this after every graph call.

        The live line refreshes itself. In the log, and without a terminal, a line is written every
        ``log_seconds``.

        Args:
            step: the last step of the call
            is_warm: whether the speed includes this call; False for the first call of a graph
        """
        self._step = step
        if self._meter is None:
            return
        self._meter.advance(step, is_warm)
        if time.monotonic() - self._printed_at >= self._log_seconds:
            self._put_line()

    def note_saved(self, step: int) -> None:
        """Adds a line for a checkpoint, unless the last line is recent or shows the same step."""
        self._put_new_line(step, "saved")

    def stop(self) -> None:
        """Ends the progress line; without a terminal, prints a last line."""
        has_trained = self._meter is not None and self._step > self._start
        # A terminal shows the line anyway, so it is only added to the log.
        if has_trained and (self._progress is not None or self._printed_step != self._step):
            self._put_line()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._meter = None

    @contextlib.contextmanager
    def defer(self, is_deferred: bool = True) -> Iterator[None]:
        """Marks that hooks run within the context.

        If the hooks are deferred, ``show_step`` prints nothing while a run trains.
        """
        self._is_deferred = is_deferred
        try:
            yield
        finally:
            self._is_deferred = False

    def step(self, step: int) -> None:
        """Prints a line with the step, at most once a second, unless the live line shows it."""
        step = operator.index(step)
        if self._progress is not None or (self._is_deferred and self._meter is not None):
            return
        self._put_new_line(step)

    def values(
        self,
        step: int,
        split: str,
        values: Mapping[str, Scalar | dict[str, Scalar]],
        prefix: str = "",
        remark: str = "",
        shown: bool = True,
    ) -> None:
        """Shows values of a step, and passes them to the listeners.

        While a run trains, training values appear on its progress line. Other values are printed.

        Args:
            step: the number of the step
            split: ``train``, ``eval`` or ``watch``; TensorBoard's run has the same name
            values: the values by name; the values of a dict are shown as ``name/key``
            prefix: a string to show before each name
            remark: a string to show after the values
            shown: whether the console shows the values
        """
        step = operator.index(step)
        numbers = _flatten(values)
        if self.listeners is not None:
            reported = dict(numbers)
            if split == "train":
                for name, rate in self.read_rates().items():
                    reported.setdefault(name, rate)
            self.listeners.tell("values", step, split, reported)
        if not shown:
            return
        shown_values = {f"{prefix}{name}": number for name, number in numbers.items()}
        self._step = step
        if split == "train" and self._meter is not None:
            for key, number in shown_values.items():
                self._values.pop(key, None)  # moves the name to the end of the dict
                self._values[key] = number
            return
        total = f"/{self._total}" if self._meter is not None else ""
        name = "" if split == "train" else f"{split}: "
        line = f"step {step}{total}  {name}{format_values(shown_values)}"
        if remark:
            line += f"  {remark}"
        self._note_printed()
        self.say(line)

    def _format_epoch(self, steps_per_epoch: int) -> str:
        """Returns the current epoch and the number of epochs, such as ``epoch 2/5``."""
        # The small number compensates for rounding errors in the number of passes.
        done = self._passes + (self._step - self._start) / steps_per_epoch + 1e-9
        all_epochs = self._passes + (self._total - self._start) / steps_per_epoch - 1e-9
        epochs = math.ceil(all_epochs)
        return f"epoch {min(int(done) + 1, epochs)}/{epochs}"

    def _make_line(self) -> ProgressLine:
        """Returns the current progress line."""
        line = ProgressLine(f"step {self._step}", values=format_values(self._choose_values()))
        if self._meter is None:
            return line
        line.step += f"/{self._total}"
        line.share = self._step / max(self._total, 1)
        if self._steps_per_epoch:
            line.epoch = self._format_epoch(self._steps_per_epoch)
        shortest = 0.0
        if self._progress is not None:
            shortest = SPEED_SECONDS
        speed = self._meter.measure_speed(shortest)
        if speed:
            digits = 0 if speed >= 100 else 1
            line.speed = f"{speed:.{digits}f} steps/s"
        line.elapsed = format_seconds(self._meter.measure_elapsed())
        remaining = self._meter.estimate_remaining()
        if remaining is not None:
            line.remaining = f"{format_seconds(remaining)} left"
        return line

    def _choose_values(self) -> dict[str, float]:
        """Returns the loss and the latest other values, at most ``MOST_VALUES`` in total."""
        names = [name for name in self._values if name == "loss"]
        others = [name for name in self._values if name != "loss"]
        names += others[len(names) - MOST_VALUES :]
        return {name: self._values[name] for name in names}

    def _put_new_line(self, step: int, remark: str = "") -> None:
        """Prints the progress line, unless the last line is recent or shows the same step."""
        self._step = step
        is_recent = time.monotonic() - self._printed_at < STEP_SECONDS
        if step != self._printed_step and not is_recent:
            self._put_line(remark)

    def _put_line(self, remark: str = "") -> None:
        """Prints the progress line; if a terminal shows it already, only writes it to the log."""
        self._note_printed()
        line = str(self._make_line())
        if remark:
            line += f"  {remark}"
        if self._progress is not None:
            LOG.info(line)
        else:
            self.say(line)

    def _note_printed(self) -> None:
        self._printed_at = time.monotonic()
        self._printed_step = self._step

    def _print(self, text: str) -> None:
        if self._shown and self._terminal.is_terminal:
            self._terminal.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
        elif self._shown:
            # The newline is part of the text, because another thread may print between two writes.
            print(f"{text}\n", end="", file=self._terminal.file, flush=True)


def _flatten(values: Mapping[str, Scalar | dict[str, Scalar]]) -> dict[str, float]:
    """Returns the values as floats; the values of a dict are named ``name/key``."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            for key, scalar in value.items():
                numbers[f"{name}/{key}".rstrip("/")] = _make_float(scalar)
        else:
            numbers[name.rstrip("/")] = _make_float(value)
    return numbers


def _make_float(scalar: Scalar) -> float:
    """Converts a Python number, or a scalar of NumPy or TensorFlow, to a float."""
    return float(np.asarray(scalar).item())


def format_values(values: Mapping[str, Any]) -> str:
    """Returns values as a string such as ``loss 0.2247  accuracy 0.9499``."""
    return "  ".join(f"{name} {value:.4g}".replace("nan", "NaN") for name, value in values.items())


def format_evaluation(values: Mapping[str, Any], of: int, step: int) -> str:
    """Returns the values of an evaluation as a line.

    Args:
        values: the values by name
        of: the step that was evaluated
        step: the current step of the run; if it differs from ``of``, the line names ``of``
    """
    subject = "evaluation"
    if of != step:
        subject += f" of step {of}"
    return f"{subject}: {format_values(values)}"


# Matches the path of a file of TensorFlow or Keras.
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
    """Makes ``report`` and ``show_step`` write to a console.

    Returns:
        The previously active console, which the caller activates again afterwards.
    """
    global _active
    before = _active
    _active = console
    return before


def create_console() -> Console:
    """Returns a console for a run that is loaded but not trained.

    If a hook of another run loads the run, the new console prints in the same place as the console
    of the other run: above the progress line and, in a cluster, only on the chief.
    """
    if _active is None:
        return Console()
    return _active.create_sibling()


def report(step: int, *, console: bool = True, **values: Scalar | dict[str, Scalar]) -> None:
    """Prints values, and writes them to TensorBoard and metrics.jsonl; call it in host hooks.

    While a run trains, its progress line shows the loss and the latest four other values.

    Args:
        step: the step that the values belong to
        console: whether to print the values; pass False if there are many
        **values: scalars by name, or dicts of scalars

    Raises:
        ValueError: a value is called ``split``, which is a key of each line of metrics.jsonl.
    """
    if "split" in values:
        raise ValueError("ctl.report: 'split' is a key of each line of metrics.jsonl; rename it.")
    (_active or Console()).values(step, "train", values, shown=console)


def warn(text: str) -> None:
    """Prints a warning, once."""
    (_active or Console()).warn(text)


def show_step(step: int) -> None:
    """Prints the step, at most once a second; call it in host hooks.

    If the console has a progress line, which shows the step anyway, nothing is printed.
    """
    (_active or Console()).step(step)
