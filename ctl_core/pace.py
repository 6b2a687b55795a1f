"""How a run goes: its learning rate, how fast it is and how long it has taken, in progress.jsonl.

These depend on the clock, or are no measurements, and so are not in metrics.jsonl, whose lines are
the same whenever a run is resumed. A line is written with a line of metrics.jsonl, one for a step,
ten times a second at most, and less often the longer a run has gone on.
"""

from __future__ import annotations

import time

from ctl_core.console import LOG
from ctl_core.errors import brief
from ctl_core.numerics.learning_rate import rates_used
from ctl_core.run_folder import Run
from ctl_core.state import State

# Between two lines, at least so many seconds, and so much of the time that the run has taken: ten
# hours are about 4,000 lines.
SHORTEST, SHARE = 0.1, 1 / 500
# Speed is not measured over fewer seconds than these.
MEASURED = 0.02


class Pace:
    """Writes the progress.jsonl of one run; on the chief.

    A line has ``step``, ``learning_rate`` (of several objectives ``learning_rate/NAME``),
    ``steps_per_second`` and ``examples_per_second`` since the line before, evaluations and
    checkpoints left out, and ``seconds``, the time trained in all starts of the run together.
    """

    def __init__(self, state: State, run: Run) -> None:
        """Begins to count.

        Args:
            state: of the run, which is about to be trained
            run: whose files are open
        """
        self._state, self._run = state, run
        self._start = time.monotonic()
        self._written_at = -1.0
        self._busy, self._step, self._examples = 0.0, state.step, state.progress.examples
        self._began, self._noted, self._warned = self._step, -1, False
        run.at_the_end = self.end

    def look(self, *_: object) -> None:
        """Writes a line, if that is due; called whenever metrics are."""
        if self._state.step == self._noted:
            return
        now = time.monotonic()
        pause = max(SHORTEST, SHARE * (self._run.seconds + now - self._start))
        if self._written_at < 0 or now - self._written_at >= pause:
            self._write(now)

    def end(self) -> float:
        """Writes the last line, if its step has none; returns the time trained in all starts."""
        now = time.monotonic()
        if self._state.step > max(self._began, self._noted):
            self._write(now)
        return self._seconds(now)

    def _seconds(self, now: float) -> float:
        return round(self._run.seconds + now - self._start, 2)

    def _write(self, now: float) -> None:
        state = self._state
        step = state.step
        values = self._rates()
        self._noted = step
        (busy, _), examples = state.clock.training(), state.progress.examples
        if step > self._step and busy - self._busy >= MEASURED:
            taken = busy - self._busy
            values["steps_per_second"] = _short((step - self._step) / taken)
            values["examples_per_second"] = _short((examples - self._examples) / taken)
            self._busy, self._step, self._examples = busy, step, examples
        values["seconds"] = self._seconds(now)
        self._run.write_progress(step, values)
        self._written_at = now

    def _rates(self) -> dict[str, float]:
        """Returns the learning rates by name; no run fails of one that cannot be read."""
        context = self._state.context
        try:
            rates = rates_used(context.lr, context.optimizers)
        except Exception as error:
            if not self._warned:
                LOG.warning("the learning rate cannot be read: %s", brief(error))
            self._warned = True
            return {}
        return {"learning_rate" + f"/{n}" * bool(n): _short(rate) for n, rate in rates.items()}


def _short(value: float) -> float:
    """Returns a number without the digits that float32 does not have."""
    return float(f"{value:.6g}")
