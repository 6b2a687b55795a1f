"""How a run goes, for TensorBoard: its learning rate and how fast it is.

These depend on the clock, or are no measurements, and so are not in metrics.jsonl, whose lines are
the same whenever a run is resumed.
"""

from __future__ import annotations

import time

from ctl_core.console import LOG
from ctl_core.errors import brief
from ctl_core.numerics.learning_rate import rates_used
from ctl_core.run.summaries import Summaries
from ctl_core.state import State

# Between two measurements, at least so many seconds.
PAUSE = 0.1


class Pace:
    """Writes scalars to the ``tb/train`` of one run; on the chief.

    They are ``progress/learning_rate`` (of several objectives ``progress/learning_rate/NAME``),
    ``progress/steps_per_second`` and ``progress/examples_per_second`` since those before,
    evaluations and checkpoints left out.
    """

    def __init__(self, state: State, summaries: Summaries) -> None:
        """Begins to count.

        Args:
            state: of the run, which is about to be trained
            summaries: of the run
        """
        self._state, self._summaries = state, summaries
        self._written_at, self._warned = -PAUSE, False
        self._busy, self._step, self._examples = 0.0, state.step, state.progress.examples

    def look(self, *_: object) -> None:
        """Writes, if that is due; called whenever metrics are."""
        state, now = self._state, time.monotonic()
        if state.step == self._step or now - self._written_at < PAUSE:
            return
        values, examples = self._rates(), state.progress.examples
        busy = state.clock.training()[0]
        if (taken := busy - self._busy) > 0:
            values["steps_per_second"] = (state.step - self._step) / taken
            values["examples_per_second"] = (examples - self._examples) / taken
        self._busy, self._step, self._examples = busy, state.step, examples
        values = {f"progress/{name}": value for name, value in values.items()}
        self._summaries.values(state.step, "train", values)
        self._written_at = now

    def _rates(self) -> dict[str, float]:
        """Returns the learning rates by name; no run fails of one that cannot be read."""
        parts = self._state.parts
        try:
            rates = rates_used(parts.lr, parts.optimizers)
        except Exception as error:
            if not self._warned:
                LOG.warning("the learning rate cannot be read: %s", brief(error))
            self._warned = True
            return {}
        return {"learning_rate" + f"/{n}" * bool(n): rate for n, rate in rates.items()}
