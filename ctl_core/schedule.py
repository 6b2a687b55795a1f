"""Decides after which step a graph call ends, and which hooks, evaluations and saves are then due.

Signals are handled between two calls. How a run is split into calls does not change its results,
because each step of a call is the same graph.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ctl_core.hooks.hooks import Hook
from ctl_core.hooks.table import OBSERVED
from ctl_core.model.state import State
from ctl_core.run.errors import SetupError
from ctl_core.run.settings import EPOCHS, PERIODS, parse_seconds

# How long a graph call should take.
TARGET_SECONDS = 1.0
# The most steps of a graph call, since signals and the clock are only checked between two calls.
MOST_STEPS = 1000


class Schedule:
    """Decides which hooks, evaluations and checkpoints are due after a step.

    Attributes:
        last: the last step of the run
    """

    def __init__(self, state: State, marks: tuple[int, ...]) -> None:
        """Reads the periods of the hooks and settings.

        Args:
            state: of the run
            marks: further steps after which the graph is left
        """
        hooks = state.hooks
        config = state.config
        self.last = 0
        self._every = [
            (period, hook) for period, group in hooks.every_steps.items() for hook in group
        ]
        self._deferred = [(period, hook) for period, hook in self._every if hook.deferred]
        self._at = hooks.at_step
        self._marks = marks
        # The graph is left whenever one of these periods ends.
        self._periods_of_settings = {
            name: convert_to_steps(state, name, getattr(config, name)) for name in PERIODS
        }
        self._periods_of_settings["log_every"] = 0  # unless there is something to log
        if state.components.list_logged_metrics():
            self._periods_of_settings["log_every"] = config.log_every
        self._periods = {period for period, hook in self._every if not hook.deferred}
        self._periods |= set(self._periods_of_settings.values()) - {0}
        self._save_interval = parse_seconds(config.ckpt_every)
        self._max_time = parse_seconds(config.max_time)
        self._start = time.monotonic()
        self._last_save = self._start

    def find_next_stop(self, step: int) -> int:
        """Returns the next step after which the graph has to be left."""
        periodic = (step - step % period + period for period in self._periods)
        fixed = (stop for stop in (*self._at, *self._marks) if stop > step)
        return min([self.last, *periodic, *fixed])

    def find_due(self, step: int) -> list[Hook]:
        """Returns the hooks to run after a step: every_steps first, then at_step."""
        periodic = [hook for period, hook in self._every if step % period == 0]
        return periodic + list(self._at.get(step, ()))

    def find_fetches(self, step: int) -> frozenset[str]:
        """Returns the names of the values of a step that its due hooks take as arguments.

        The step computes no others, see ``StepResult``.
        """
        due = self.find_due(step)
        return frozenset(name for hook in due for name in hook.arguments if name in OBSERVED)

    def find_deferred(self, steps: range) -> list[tuple[int, Hook]]:
        """Returns the deferred hooks that were due during a graph call, each with its step."""
        return [
            (step, hook) for step in steps for period, hook in self._deferred if step % period == 0
        ]

    def is_evaluation_due(self, step: int) -> bool:
        """Returns True if an evaluation is due after this step."""
        return step == self.last or self._is_over("eval_every", step)

    def find_log_due(self, step: int) -> tuple[bool, bool]:
        """Returns whether train metrics are written after a step, and whether they are reset."""
        is_period_over = self._is_over("log_every", step)
        is_last = step == self.last and self._periods_of_settings["log_every"] > 0
        return is_period_over or is_last, is_period_over

    def is_save_due(self, step: int) -> bool:
        """Returns True if a checkpoint is due after this step."""
        return self._is_over("ckpt_every", step)

    def _is_over(self, setting: str, step: int) -> bool:
        """Returns True if the period of a setting ends after this step; one of 0 never does."""
        period = self._periods_of_settings[setting]
        return step > 0 and period > 0 and step % period == 0

    def is_time_to_save(self) -> bool:
        """Returns True if the time since the last checkpoint is up."""
        if self._save_interval is None:
            return False
        return time.monotonic() - self._last_save >= self._save_interval

    def note_saved(self) -> None:
        """Restarts the time until the next checkpoint."""
        self._last_save = time.monotonic()

    def is_time_to_end(self) -> bool:
        """Returns True if the time of ``max_time`` is up."""
        if self._max_time is None:
            return False
        return time.monotonic() - self._start >= self._max_time


def convert_to_steps(state: State, setting: str, value: int | str) -> int:
    """Returns a period in steps; 0 for never, and for a time.

    Args:
        state: of the run, which knows the number of steps in an epoch
        setting: the name of the setting, for a message
        value: the period: a number of steps, a number of epochs such as ``2epochs``, or a time

    Raises:
        SetupError: the period is in epochs, but the data are endless.
    """
    if isinstance(value, int):
        return value
    epochs = re.fullmatch(EPOCHS, value)
    if epochs is None:
        return 0
    if state.data.steps_per_epoch is None:
        raise SetupError(
            f"{setting}: the dataset of create_dataset or make_batches is endless, so it has "
            "no epochs; use a number of steps instead."
        )
    return int(epochs[1]) * state.data.steps_per_epoch


class StepsPerCall:
    """Learns from the calls so far how many steps take about ``TARGET_SECONDS``.

    Attributes:
        limit: the most steps of the next call
    """

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
        # It grows at most fourfold, so that one quick call does not lead to a very long one.
        self.limit = max(1, min(fitting, 4 * self.limit, self._most))
