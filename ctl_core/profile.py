"""Where the time of a run goes: a summary at its end, and a TensorBoard profile of some steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from ctl_core.console import Console
from ctl_core.files import from_here

PARTS = ("steps", "hooks", "evaluation", "checkpoints")


class Clock:
    """Adds up the seconds that each part of the outer loop takes; costs two readings a part.

    Attributes:
        seconds: by part, of ``PARTS``; tracing counts where it happens, mostly in steps
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._start = time.monotonic()

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Adds what happens within to a part, also if it fails."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] += time.monotonic() - start

    def training(self) -> float:
        """Returns the seconds of steps and their hooks."""
        return self.seconds["steps"] + self.seconds["hooks"]

    @property
    def total(self) -> float:
        """The seconds since the clock was made."""
        return time.monotonic() - self._start

    def summary(self) -> str:
        """Says in one line what share of the time went where."""
        total = self.total + 1e-9
        shares = {**self.seconds, "other": max(0.0, total - sum(self.seconds.values()))}
        text = ", ".join(f"{name} {share / total:.0%}" for name, share in shares.items())
        return f"time: {text} of {total:.1f} s"


class Profile:
    """Profiles steps for TensorBoard, which slows them down.

    Attributes:
        marks: it begins after the first step, and ends after the second; empty: no profile
    """

    def __init__(self, marks: tuple[int, ...], folder: Path, console: Console) -> None:
        self.marks = marks
        self._folder, self._console = folder, console
        self._running = False

    def at(self, step: int) -> None:
        """Begins or ends after a step, if it is time."""
        due = len(self.marks) == 2 and self.marks[0] <= step < self.marks[1]
        if due and not self._running:
            tf.profiler.experimental.start(str(self._folder))
            self._running = True
        elif not due:
            self.end()

    def end(self) -> None:
        """Ends the profile, if it is running, and says where it is."""
        if self._running:
            self._running = False
            tf.profiler.experimental.stop()
            (start, stop), place = self.marks, from_here(self._folder)
            self._console.say(f"the profile of the steps after {start} up to {stop} is in {place}")
