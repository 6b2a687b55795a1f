"""Decides after which step a graph call ends, and which hooks, evaluations and saves are then due.

Signals are handled between two calls. How a run is split into calls does not change its results,
because every step runs the same graph.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ctl_core.hooks.hooks import Hook
from ctl_core.hooks.table import OBSERVED
from ctl_core.model.state import State
from ctl_core.run.errors import SetupError
from ctl_core.run.settings import EPOCHS, LARGEST, PERIODS, parse_seconds

# The time that a graph call should take.
TARGET_SECONDS = 1.0
# The maximum number of steps in a graph call. It is limited, because signals and the clock are only
# checked between two calls.
MOST_STEPS = 1000


class Schedule:
    """Decides which hooks, evaluations and checkpoints are due after a step.

    Attributes:
        last: the last step of the run
    """

    def __init__(self, state: State, marks: tuple[int, ...], seconds_before: float = 0.0) -> None:
        """Reads the periods of the hooks and settings.

        Args:
            state: the state of the run
            marks: further steps after which a graph call has to end
            seconds_before: the seconds that have passed since the command was started
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
        # A graph call ends whenever one of these periods ends.
        self._periods_of_settings = {
            name: convert_to_steps(state, name, getattr(config, name)) for name in PERIODS
        }
        self._periods_of_settings["log_every"] = 0  # nothing is logged if there are no metrics
        if state.components.list_logged_metrics():
            self._periods_of_settings["log_every"] = config.log_every
        self._periods = {period for period, hook in self._every if not hook.deferred}
        self._periods |= set(self._periods_of_settings.values()) - {0}
        self._save_interval = parse_seconds(config.ckpt_every)
        self._max_time = parse_seconds(config.max_time)
        self._last_save = time.monotonic()
        self._start = self._last_save - seconds_before

    def find_next_stop(self, step: int) -> int:
        """Returns the next step after which the graph call has to end."""
        periodic = (step - step % period + period for period in self._periods)
        fixed = (stop for stop in (*self._at, *self._marks) if stop > step)
        return min([self.last, *periodic, *fixed])

    def find_due(self, step: int) -> list[Hook]:
        """Returns the hooks to run after a step: first those of every_steps, then of at_step."""
        periodic = [hook for period, hook in self._every if step % period == 0]
        return periodic + list(self._at.get(step, ()))

    def find_fetches(self, step: int) -> frozenset[str]:
        """Returns the names of the values of a step that the due hooks have as arguments.

        The step does not compute any other values, see ``StepResult``.
        """
        due = self.find_due(step)
        return frozenset(name for hook in due for name in hook.arguments if name in OBSERVED)

    def find_deferred(self, steps: range) -> list[tuple[int, Hook]]:
        """Returns the deferred hooks that were due at some steps, as pairs of step and hook."""
        return [
            (step, hook) for step in steps for period, hook in self._deferred if step % period == 0
        ]

    def is_evaluation_due(self, step: int) -> bool:
        """Returns True if an evaluation is due after this step."""
        return step == self.last or self._is_over("eval_every", step)

    def find_log_due(self, step: int) -> tuple[bool, bool]:
        """Returns whether to log the train metrics after a step, and whether to reset them."""
        is_period_over = self._is_over("log_every", step)
        is_last = step == self.last and self._periods_of_settings["log_every"] > 0
        return is_period_over or is_last, is_period_over

    def is_save_due(self, step: int) -> bool:
        """Returns True if a checkpoint is due after this step."""
        return self._is_over("ckpt_every", step)

    def _is_over(self, setting: str, step: int) -> bool:
        """Returns True if the period of a setting ends after this step.

        A period of 0 never ends.
        """
        period = self._periods_of_settings[setting]
        return step > 0 and period > 0 and step % period == 0

    def is_time_to_save(self) -> bool:
        """Returns True if enough time has passed since the last checkpoint."""
        if self._save_interval is None:
            return False
        return time.monotonic() - self._last_save >= self._save_interval

    def note_saved(self) -> None:
        """Restarts the timer for the next checkpoint, even if this one was not written."""
        self._last_save = time.monotonic()

    def is_time_to_end(self) -> bool:
        """Returns True if ``max_time`` has passed since the command was started."""
        if self._max_time is None:
            return False
        return time.monotonic() - self._start >= self._max_time


def convert_to_steps(state: State, setting: str, value: int | str) -> int:
    """Converts a period to a number of steps; returns 0 if the period is a time or 0 (never).

    Args:
        state: the state of the run, which has the number of steps in an epoch
        setting: the name of the setting, for the error message
        value: the period: a number of steps, a number of epochs such as ``2epochs``, or a time

    Raises:
        SetupError: the period is given in epochs, but the data are endless.
    """
    if isinstance(value, int):
        return value
    epochs = re.fullmatch(EPOCHS, value)
    if epochs is None:
        return 0
    return convert_epochs(state, setting, int(epochs[1]))


def convert_epochs(state: State, setting: str, epochs: int) -> int:
    """Converts a number of epochs to a number of steps.

    Args:
        state: the state of the run, which has the number of steps in an epoch
        setting: the name of the setting, for the error message
        epochs: the number of epochs

    Raises:
        SetupError: the data are endless, or the number of steps is too large.
    """
    if state.data.steps_per_epoch is None:
        raise SetupError(
            f"{setting}: the dataset of create_dataset or make_batches is endless, so it has "
            "no epochs; use a number of steps instead."
        )
    steps = epochs * state.data.steps_per_epoch
    if steps > LARGEST:
        raise SetupError(
            f"{setting}: {epochs} epochs of {state.data.steps_per_epoch} steps are more than "
            f"{LARGEST} steps; use a smaller number."
        )
    return steps


class StepsPerCall:
    """Finds out from the graph calls so far how many steps take about ``TARGET_SECONDS``.

    Attributes:
        limit: the maximum number of steps in the next call
    """

    def __init__(self, most: int) -> None:
        self.limit = min(8, most)
        self._most = most

    @contextmanager
    def measure(self, steps: int) -> Iterator[int]:
        """Measures a graph call of ``steps`` steps, and adjusts ``limit``; yields ``steps``."""
        start = time.monotonic()
        yield steps
        seconds = max(time.monotonic() - start, 1e-9)
        fitting = int(steps * TARGET_SECONDS / seconds)
        # The limit grows at most fourfold, so that a quick call is not followed by a very long one.
        self.limit = max(1, min(fitting, 4 * self.limit, self._most))
