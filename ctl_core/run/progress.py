"""Formats the progress and the speed of training as one line of text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from rich.console import Console as Terminal
from rich.progress import ProgressColumn, Task
from rich.text import Text

# The maximum number of values on a line: the loss, and the latest other values.
MOST_VALUES = 5
# The minimum and maximum width of the bar (columns).
SHORTEST_BAR = 5
LONGEST_BAR = 40
# The minimum number of seconds on which an estimate of the remaining time is based.
SHORTEST_ESTIMATE = 2.0
_SPACE = "  "


@dataclasses.dataclass
class ProgressLine:
    """The parts of the progress line, as strings; a part is empty if its value is not known.

    Attributes:
        step: the current step, such as ``step 300/600``
        epoch: the current epoch, such as ``epoch 3/10``
        values: the latest values, such as ``loss 0.2247  accuracy 0.9499``
        speed: the speed of training, such as ``145 steps/s``
        elapsed: the time since the start, such as ``0:12``
        remaining: the estimated time until the end, such as ``0:24 left``
        share: the fraction of the training that is done, from 0 to 1
    """

    step: str = ""
    epoch: str = ""
    values: str = ""
    speed: str = ""
    elapsed: str = ""
    remaining: str = ""
    share: float = 0.0

    def __str__(self) -> str:
        """Returns the full line without a bar, for a file or a pipe."""
        return _SPACE.join(self._list_parts().values())

    def fit(self, width: int) -> str:
        """Returns the line for a terminal of ``width`` columns, with a bar if there is room.

        If the terminal is too narrow, the bar becomes shorter and is then left out. If that is not
        enough, the elapsed time, the speed, the epoch and the remaining time are left out, in this
        order, and finally the values are truncated.
        """
        parts = self._list_parts()
        for name in ("elapsed", "speed", "epoch", "remaining"):
            if len(_SPACE.join(parts.values())) <= width:
                break
            parts.pop(name, None)
        line = _SPACE.join(parts.values())
        if len(line) > width:
            return f"{line[: max(0, width - 1)]}…"
        room = min(width - len(line) - len(_SPACE), LONGEST_BAR)
        if room < SHORTEST_BAR:
            return line
        beginning = _SPACE.join(parts.pop(name) for name in ("step", "epoch") if name in parts)
        return _SPACE.join([beginning, draw_bar(self.share, room), *parts.values()])

    def _list_parts(self) -> dict[str, str]:
        """Returns the parts that are not empty, by name, in their order on the line."""
        texts = {
            "step": self.step,
            "epoch": self.epoch,
            "values": self.values,
            "speed": self.speed,
            "elapsed": self.elapsed,
            "remaining": self.remaining,
        }
        return {name: text for name, text in texts.items() if text}


def draw_bar(share: float, width: int) -> str:
    """Returns a bar of ``width`` characters; ``share``, from 0 to 1, is the filled fraction."""
    filled = int(min(max(share, 0.0), 1.0) * width)
    return "━" * filled + "─" * (width - filled)


def format_seconds(seconds: float) -> str:
    """Returns a duration as minutes and seconds (``1:05``), or with hours (``2:03:04``)."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    if hour:
        return f"{hour}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


# What replaces the characters of a line in a terminal whose encoding does not have them.
_ASCII = str.maketrans("━─…", "=-.")


class LineColumn(ProgressColumn):
    """Shows a ``ProgressLine`` as the only column of a ``rich`` progress display."""

    def __init__(self, terminal: Terminal, get_line: Callable[[], ProgressLine]) -> None:
        super().__init__()
        self._terminal = terminal
        self._get_line = get_line

    def render(self, task: Task) -> Text:
        """Returns the line; ``rich`` calls this twice a second."""
        line = self._get_line().fit(self._terminal.width)
        if not self._terminal.encoding.startswith("utf"):
            line = line.translate(_ASCII)
        return Text(line, no_wrap=True, overflow="crop")


class SpeedMeter:
    """Measures the speed of training, and estimates the remaining time."""

    def __init__(self, start: int, total: int, training_clock: Callable[[], float]) -> None:
        """Starts the measurement.

        Args:
            start: the step from which this process trains
            total: the last step of the run
            training_clock: returns the seconds of training, without evaluations and checkpoints
        """
        self._total = total
        self._training_clock = training_clock
        self._begun = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._mark: tuple[float, int] | None = None
        self._step = start
        self._speed = 0.0

    def advance(self, step: int, is_warm: bool = True) -> None:
        """Records the step that a graph call has reached.

        Args:
            step: the last step of the call
            is_warm: whether the measurement includes the call. TensorFlow optimizes or compiles a
                graph in its first call, so the measurement starts after that call.
        """
        self._step = step
        if self._first is None or not is_warm:
            self._first = (time.monotonic(), step)
            self._mark = (self._training_clock(), step)

    def measure_speed(self, shortest: float) -> float:
        """Returns the steps per second since the last measurement; 0 if it is not known yet.

        Args:
            shortest: the minimum number of training seconds for a new measurement; until then, the
                previous speed is returned
        """
        if self._mark is None:
            return 0.0
        seconds = self._training_clock() - self._mark[0]
        steps = self._step - self._mark[1]
        if steps > 0 and seconds >= shortest:
            self._speed = steps / seconds
            self._mark = (self._training_clock(), self._step)
        return self._speed

    def measure_elapsed(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self._begun

    def estimate_remaining(self) -> float | None:
        """Returns the seconds until the last step, including evaluations; None if unknown."""
        if self._first is None or self._step <= self._first[1] or self._step >= self._total:
            return None
        seconds = time.monotonic() - self._first[0]
        if seconds < SHORTEST_ESTIMATE:
            return None
        return seconds / (self._step - self._first[1]) * (self._total - self._step)
