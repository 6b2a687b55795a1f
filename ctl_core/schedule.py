"""When the graph is left: what is due after which step or at what time, how long a call may be.

A signal is answered between two calls. The split of a run into calls does not change its
results: each step of a call is the same graph.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ctl_core.hooks.hooks import Hook
from ctl_core.hooks.table import OBSERVED
from ctl_core.model.state import State
from ctl_core.run.errors import SetupError
from ctl_core.run.settings import EPOCHS, parse_seconds

TARGET_SECONDS = 1.0
# Most steps of a graph call: a signal and the clock are looked at between two.
MOST_STEPS = 1000


class Schedule:
    """Which hooks, evaluations and checkpoints are due after which step; which is the ``last``."""

    def __init__(self, state: State, marks: tuple[int, ...]) -> None:
        """``marks`` are steps after which the graph is left, too."""
        hooks, config = state.hooks, state.config
        self.last = 0
        self._every = [(n, hook) for n, several in hooks.every_steps.items() for hook in several]
        self._deferred = [(n, hook) for n, hook in self._every if hook.deferred]
        self._at, self._marks = hooks.at_step, marks
        self._ckpt_every = convert_to_steps(state, "ckpt_every", config.ckpt_every)
        self._eval_every = convert_to_steps(state, "eval_every", config.eval_every)
        self._log_every = config.log_every if state.components.list_logged_metrics() else 0
        self._periods = {n for n, hook in self._every if not hook.deferred}
        self._periods |= {self._ckpt_every, self._eval_every, self._log_every} - {0}
        self._pause, self._time = parse_seconds(config.ckpt_every), parse_seconds(config.max_time)
        self._start = self._saved = time.monotonic()

    def find_next_stop(self, step: int) -> int:
        """Returns the next step after which the graph has to be left."""
        periodic = (step - step % n + n for n in self._periods)
        once = (n for n in (*self._at, *self._marks) if n > step)
        return min([self.last, *periodic, *once])

    def find_due(self, step: int) -> list[Hook]:
        """Returns the hooks to run after a step: every_steps first, each in its own order."""
        return [hook for n, hook in self._every if step % n == 0] + list(self._at.get(step, ()))

    def find_fetches(self, step: int) -> frozenset[str]:
        """Returns what of a step hooks are given that are due after it."""
        due = self.find_due(step)
        return frozenset(name for hook in due for name in hook.arguments if name in OBSERVED)

    def find_deferred(self, steps: range) -> list[tuple[int, Hook]]:
        """Returns steps for which the graph was not left, each with a hook due after it."""
        return [(step, hook) for step in steps for n, hook in self._deferred if step % n == 0]

    def is_evaluation_due(self, step: int) -> bool:
        """Whether an evaluation belongs after this step."""
        return step == self.last or is_multiple(step, self._eval_every)

    def find_log_due(self, step: int) -> tuple[bool, bool]:
        """Returns whether train metrics are to be written after a step, and to begin anew."""
        whole = is_multiple(step, self._log_every)
        return whole or (step == self.last and self._log_every > 0), whole

    def is_save_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step."""
        return is_multiple(step, self._ckpt_every)

    def is_time_to_save(self) -> bool:
        """Whether the clock says that a checkpoint is due."""
        return self._pause is not None and time.monotonic() - self._saved >= self._pause

    def note_saved(self) -> None:
        """Begins the time to the next checkpoint."""
        self._saved = time.monotonic()

    def is_time_to_end(self) -> bool:
        """Whether the clock says that training ends."""
        return self._time is not None and time.monotonic() - self._start >= self._time


def convert_to_steps(state: State, setting: str, value: int | str) -> int:
    """Returns steps, or so many ``epochs``, in steps; of a period in time, 0.

    Raises:
        SetupError: there are no epochs.
    """
    if isinstance(value, int):
        return value
    if not (epochs := re.fullmatch(EPOCHS, value)):
        return 0
    if state.data.steps_per_epoch is None:
        raise SetupError(
            f"{setting}: create_dataset or make_batches gives an endless dataset, which has no "
            "epochs; say how many steps, or how many minutes."
        )
    return int(epochs[1]) * state.data.steps_per_epoch


def is_multiple(step: int, period: int) -> bool:
    """Whether a period ends after this step; 0 is none."""
    return step > 0 and period > 0 and step % period == 0


class StepsPerCall:
    """Learns from the calls so far how many steps fit into a second: ``limit``, of the next."""

    def __init__(self, most: int) -> None:
        self.limit = min(8, most)
        self._most = most

    @contextmanager
    def measure(self, steps: int) -> Iterator[int]:
        """Measures a call of ``steps`` steps, which it yields back."""
        start = time.monotonic()
        yield steps
        seconds = max(time.monotonic() - start, 1e-9)
        fitting = int(steps * TARGET_SECONDS / seconds)
        # Growing fourfold at most, so that one quick call does not lead to a very long one.
        self.limit = max(1, min(fitting, 4 * self.limit, self._most))
