"""How a run goes, for TensorBoard: its learning rate and how fast it is.

These depend on the clock, or are no measurements, and so are not in metrics.jsonl, whose lines are
the same whenever a run is resumed.
"""

from __future__ import annotations

import time

from ctl_core.numerics.learning_rate import rates_used
from ctl_core.run.listeners import Listener
from ctl_core.run.summaries import Summaries
from ctl_core.state import State

# Between two measurements, at least so many seconds.
PAUSE = 0.1


class Pace(Listener):
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
        self._written_at = -PAUSE
        self._busy, self._step, self._examples = 0.0, state.step, state.progress.examples

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        """Writes, if that is due; called whenever metrics are."""
        state, now = self._state, time.monotonic()
        if state.step == self._step or now - self._written_at < PAUSE:
            return
        paces, examples = self._rates(), state.progress.examples
        busy = state.clock.training()
        if (taken := busy - self._busy) > 0:
            paces["steps_per_second"] = (state.step - self._step) / taken
            paces["examples_per_second"] = (examples - self._examples) / taken
        self._busy, self._step, self._examples = busy, state.step, examples
        paces = {f"progress/{name}": value for name, value in paces.items()}
        self._summaries.values(state.step, "train", paces)
        self._written_at = now

    def _rates(self) -> dict[str, float]:
        """Returns the learning rates by name."""
        rates = rates_used(self._state.parts.lr, self._state.parts.optimizers)
        return {"learning_rate" + f"/{n}" * bool(n): rate for n, rate in rates.items()}
