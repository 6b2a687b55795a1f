"""When the graph is left: what is due after which step or at what time, how long a call may be.

A signal is answered between two calls. The split of a run into calls does not change its
results: each step of a call is the same graph.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.hooks.table import OBSERVED
from ctl_core.run.errors import SetupError
from ctl_core.run.settings import EPOCHS, Config, seconds_in

TARGET_SECONDS = 1.0
# Most steps of a graph call: a signal and the clock are looked at between two.
MOST_STEPS = 1000


def in_steps(setting: str, value: int | str, steps_per_epoch: int | None) -> int:
    """Returns a period in steps; 0 for one of time, and for none.

    Args:
        setting: whose value it is, for a message
        value: steps, ``2epochs`` or ``10min``
        steps_per_epoch: None if the data have no end

    Raises:
        SetupError: there are no epochs.
    """
    if isinstance(value, int):
        return value
    if not (epochs := re.fullmatch(EPOCHS, value)):
        return 0
    if steps_per_epoch is None:
        raise SetupError(
            f"{setting}: create_dataset or make_batches gives an endless dataset, which has no "
            "epochs; say how many steps, or how many minutes."
        )
    return int(epochs[1]) * steps_per_epoch


class Schedule:
    """Which hooks, evaluations and checkpoints are due after which step."""

    def __init__(
        self,
        hooks: Hooks,
        config: Config,
        last: int,
        marks: tuple[int, ...] = (),
        train_metrics: bool = False,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Plans a run to step ``last``.

        Args:
            hooks: whose schedules count
            config: whose periods count
            last: the last step
            marks: steps after which the graph is left, too
            train_metrics: whether there are any
            steps_per_epoch: None if the data have no end
        """
        self._every = [(n, hook) for n, several in hooks.every_steps.items() for hook in several]
        self._deferred = [(n, hook) for n, hook in self._every if hook.deferred]
        self._at = hooks.at_step
        self._last = last
        self._marks = marks
        self._ckpt_every = in_steps("ckpt_every", config.ckpt_every, steps_per_epoch)
        self._eval_every = in_steps("eval_every", config.eval_every, steps_per_epoch)
        self._log_every = config.log_every if train_metrics else 0
        self._periods = {n for n, hook in self._every if not hook.deferred}
        self._periods |= {self._ckpt_every, self._eval_every, self._log_every} - {0}

    def end_at(self, step: int) -> None:
        """Makes this step the last one."""
        self._last = step

    def next_stop(self, step: int) -> int:
        """Returns the next step after which the graph has to be left."""
        periodic = (step - step % n + n for n in self._periods)
        once = (n for n in (*self._at, *self._marks) if n > step)
        return min(self._last, *periodic, *once)

    def due(self, step: int) -> list[Hook]:
        """Returns the hooks to run after a step: every_steps first, each in its own order."""
        return [hook for n, hook in self._every if step % n == 0] + list(self._at.get(step, ()))

    def find_fetches(self, step: int) -> frozenset[str]:
        """Returns what of a step hooks are given that are due after it."""
        due = self.due(step)
        return frozenset(name for hook in due for name in hook.arguments if name in OBSERVED)

    def deferred(self, steps: range) -> list[tuple[int, Hook]]:
        """Returns steps for which the graph was not left, each with a hook due after it."""
        return [(step, hook) for step in steps for n, hook in self._deferred if step % n == 0]

    def evaluation_due(self, step: int) -> bool:
        """Whether an evaluation belongs after this step."""
        return step == self._last or is_multiple(step, self._eval_every)

    def log_due(self, step: int) -> tuple[bool, bool]:
        """Returns whether train metrics are to be written after a step, and to begin anew."""
        whole = is_multiple(step, self._log_every)
        return whole or (step == self._last and self._log_every > 0), whole

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step."""
        return is_multiple(step, self._ckpt_every)


def is_multiple(step: int, period: int) -> bool:
    """Whether a period ends after this step; 0 is none."""
    return step > 0 and period > 0 and step % period == 0


class Deadlines:
    """When the clock says that a checkpoint is due, or the end of training."""

    def __init__(self, config: Config) -> None:
        self._period = seconds_in(config.ckpt_every)
        self._end = seconds_in(config.max_time)
        self._start = self._saved = time.monotonic()

    def save_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self._period is not None and time.monotonic() - self._saved >= self._period

    def saved(self) -> None:
        """Begins the next period."""
        self._saved = time.monotonic()

    def over(self) -> bool:
        """Whether it is time to end."""
        return self._end is not None and time.monotonic() - self._start >= self._end


class ChunkLength:
    """Learns from the calls so far how many steps fit into a second.

    Attributes:
        limit: the most steps that the next call should run
    """

    def __init__(self, most: int) -> None:
        self.limit = min(8, most)
        self._most = most

    @contextmanager
    def timed(self, steps: int) -> Iterator[int]:
        """Measures a call of ``steps`` steps, which it yields back."""
        start = time.monotonic()
        yield steps
        seconds = max(time.monotonic() - start, 1e-9)
        fitting = int(steps * TARGET_SECONDS / seconds)
        # Growing fourfold at most, so that one quick call does not lead to a very long one.
        self.limit = max(1, min(fitting, 4 * self.limit, self._most))


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
