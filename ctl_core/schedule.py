"""When the graph is left: which hooks, evaluations and checkpoints are due after which step."""

from __future__ import annotations

from ctl_core.hooks import Hook, Hooks
from ctl_core.rhythm import in_steps
from ctl_core.settings import Config


class Schedule:
    """Which hooks, evaluations and checkpoints are due after which step.

    Attributes:
        every_step: whether a hook that is not deferred runs after each step
    """

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
        # Whether a step runs in a chunk or on its own must not depend on where a process began,
        # or a resumed run would compute some steps by another graph.
        self.every_step = any(n == 1 and not hook.deferred for n, hook in self._every)
        self._periods = {n for n, hook in self._every if not hook.deferred}
        periods = (self._ckpt_every, self._eval_every, self._log_every)
        self._periods |= {n for n in periods if n}

    def end_at(self, step: int) -> None:
        """Makes this step the last one."""
        self._last = step

    def next_stop(self, step: int) -> int:
        """Returns the next step after which the graph has to be left."""
        periodic = (step - step % n + n for n in self._periods)
        once = (n for n in (*self._at, *self._marks) if n > step)
        return min(self._last, *periodic, *once, self._last)

    def due(self, step: int) -> list[Hook]:
        """Returns the hooks to run after a step: every_steps first, each in its own order."""
        return [hook for n, hook in self._every if step % n == 0] + list(self._at.get(step, ()))

    def deferred(self, steps: range) -> list[tuple[int, Hook]]:
        """Returns steps for which the graph was not left, each with a hook due after it."""
        return [(step, hook) for step in steps for n, hook in self._deferred if step % n == 0]

    def evaluation_due(self, step: int) -> bool:
        """Whether an evaluation belongs after this step."""
        return step == self._last or bool(
            step and self._eval_every and step % self._eval_every == 0
        )

    def log_due(self, step: int) -> tuple[bool, bool]:
        """Returns whether train metrics are to be written after a step, and to begin anew."""
        whole = bool(self._log_every and step and step % self._log_every == 0)
        return whole or bool(self._log_every and step == self._last), whole

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step."""
        return bool(step and self._ckpt_every and step % self._ckpt_every == 0)
