"""Where the time of a run goes: a summary at its end, and a TensorBoard profile of some steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from ctl_core.console import Console
from ctl_core.errors import RunError, brief
from ctl_core.files import from_here

PARTS = ("steps", "hooks", "evaluation", "checkpoints")


class Clock:
    """Adds up the seconds that each part of the outer loop takes; costs two readings a part.

    Attributes:
        seconds: by part, of ``PARTS``; tracing counts where it happens, mostly in steps
        waited: of the steps' seconds, those in which they waited for their input; worked out from
            the steps of which a host hook reads values, None if there were none
        traced: how many graph functions that take steps
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.waited: float | None = None
        self.traced = 0
        self._start = time.monotonic()

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Adds what happens within to a part, also if it fails."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] += time.monotonic() - start

    def training(self) -> tuple[float, int]:
        """Returns the seconds of steps and their hooks, and how many functions were traced."""
        return self.seconds["steps"] + self.seconds["hooks"], self.traced

    def summary(self) -> str:
        """Says what share of the time since the clock was made went where, in one line."""
        total = max(time.monotonic() - self._start, 1e-9)
        shares = dict(self.seconds)
        if self.waited is not None:
            waited = min(self.waited, shares["steps"])
            shares = {"input": waited, **shares, "steps": shares["steps"] - waited}
        shares["other"] = max(0.0, total - sum(shares.values()))
        text = ", ".join(f"{name} {share / total:.0%}" for name, share in shares.items())
        return f"time: {text} of {total:.1f} s"


class Profile:
    """Profiles the steps from ``start`` to ``stop`` for TensorBoard; without them, nothing.

    TensorFlow's profiler slows down the steps that it looks at.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, console: Console) -> None:
        self._steps = steps
        self._folder = folder
        self._console = console
        self._running = False

    @property
    def marks(self) -> tuple[int, ...]:
        """The steps after which the graph has to be left for this."""
        return self._steps or ()

    def at(self, step: int) -> None:
        """Starts or ends after a step, if it is time.

        Raises:
            RunError: the profiler cannot be started, such as when another one is running.
        """
        if self._steps is None:
            return
        start, stop = self._steps
        if self._running and step >= stop:
            self.end()
        if not self._running and start <= step < stop:
            try:
                tf.profiler.experimental.start(str(self._folder))
            except tf.errors.OpError as error:
                raise RunError(f"profile: cannot be started: {brief(error, 400)}") from error
            self._running = True

    def end(self) -> None:
        """Ends the profile, if it is running, and says where it is."""
        if not self._running or self._steps is None:
            return
        self._running = False
        tf.profiler.experimental.stop()
        start, stop = self._steps
        place = from_here(self._folder)
        self._console.say(f"the profile of steps {start} to {stop} is in {place}")
