"""The outer loop: many steps inside one graph call, then what is due.

The inner loop is in the graph, see graph.py. Everything else happens here, between two calls:
hooks, evaluation, checkpoints, signals.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from ctl_core.checkpoint.checkpoints import Checkpoints
from ctl_core.checkpoint.record import find_best_step
from ctl_core.cluster.signals import Signals
from ctl_core.cluster.sync import LoopStatus
from ctl_core.evaluation.evaluate import read_criteria
from ctl_core.evaluation.summaries import Pace, Profile
from ctl_core.graph import StepFunctions
from ctl_core.hooks.hooks import Hook
from ctl_core.model.components import TraceContext
from ctl_core.model.failures import attribute_errors
from ctl_core.model.metrics import read_results
from ctl_core.model.state import (
    Clock,
    State,
    check_hook_state,
    count_parameters,
    describe_end,
    describe_start,
    record_nonfinite,
    warn_of_nonfinite,
)
from ctl_core.numerics.not_finite import NonFinite
from ctl_core.numerics.randomness import find_random_ops
from ctl_core.run.console import Console
from ctl_core.run.errors import HookFailed, RunError, SetupError, StopTraining
from ctl_core.schedule import MOST_STEPS, Schedule, StepsPerCall, convert_to_steps

if TYPE_CHECKING:
    from ctl_core.checkpoint.folder import Run


class Trainer:
    """Trains one run in this process; with other processes, if it is one of a cluster.

    Attributes:
        state: what the run is made of, and its progress
        start: the step where this process begins
        checkpoints: of the run
        functions: the graph functions that take steps
    """

    def __init__(self, state: State, run: Run, console: Console, signals: Signals) -> None:
        """``run`` is opened, and ``console`` started, when training begins."""
        self.state = state
        self.start = 0
        self.checkpoints = Checkpoints(state, console)
        self.functions = StepFunctions(state, run.summaries.make_graph_writer("train"))
        self._run = run
        self._console = console
        self._signals, self._signal = signals, 0  # that ends training, on every process
        self._steps_per_call = StepsPerCall(1 if state.config.detect_anomaly else MOST_STEPS)
        profile = (state.config.profile or "") if state.cluster.task.chief else ""
        self._profile = Profile(profile, run.path / "tb" / "train")
        self._schedule = Schedule(state, self._profile.marks)
        names = state.evaluation.names if state.evaluation else ()
        self._criteria = read_criteria(state.config, names)

    def restore(self, go_on: bool = False) -> bool:
        """Restores the newest checkpoint, and works out how far to train.

        Returns:
            Whether there is one.

        Raises:
            SetupError: what is there does not fit, or the number of steps is not known.
        """
        state, config = self.state, self.state.config
        record = self.checkpoints.restore(self._run.start)
        progress = state.progress
        self.start, last = state.step, config.steps
        if config.epochs is not None:
            last = convert_to_steps(state, "epochs", f"{config.epochs}epochs")
            self._console.say(f"an epoch has {state.data.steps_per_epoch} steps.")
        assert last is not None
        if progress.ended is not None:
            go_on = bool(state.cluster.gather([go_on]).any())
            if self.start < last and (go_on or last > progress.ended):
                progress.ended = None
                for known in progress.best.values():
                    known[2] = 0  # evaluations since the best one, which early_stop counts
        if record and record.learning_rate != config.learning_rate:
            self._console.say(f"learning_rate is {config.learning_rate:g} from here on.")
            state.learning_rate.variable.assign(config.learning_rate)
        if state.learning_rate.schedule is not None:
            state.learning_rate.schedule.last = last
        self._schedule.last = last
        self.functions.refresh()
        return record is not None

    def train(self, source: bytes | None = None) -> None:
        """Trains from ``start`` on, and says how it went.

        Args:
            source: the file of the hooks, of which the run keeps a copy
        """
        state, run, console, schedule = self.state, self._run, self._console, self._schedule
        going_on = self.start < schedule.last and not state.ended
        if going_on:
            self._check_step()
        if state.cluster.task.chief and (going_on or not run.config_file.exists()):
            run.listeners.candidates.append(Pace(state, run.summaries))
            run.open(state.config, self.start, source, self.functions.devices)
            console.listeners = run.listeners
        console.say(describe_start(state, self.start, schedule.last))
        if not going_on:
            schedule.last = min(self.start, schedule.last)
        elif self.start == 0:
            console.say(f"the model has {count_parameters(state)}.")
        state.clock = Clock()
        console.start(self.start, schedule.last, state.clock.measure_training)
        try:
            self._loop()
        except Exception:
            self.run_at_end("failed")
            raise
        else:
            ending = "stopped" if state.stopped_by else "ended" if state.ended else "done"
            if going_on:
                self.run_at_end(ending)
        finally:
            self.checkpoints.close()
            self._profile.end()
        console.stop()
        warn_of_nonfinite(state, console)
        console.say(describe_end(state, self.start))
        run.end("diverged" if state.diverged and ending != "stopped" else ending)

    def _loop(self) -> None:
        state, schedule = self.state, self._schedule
        step = stop = self.start
        ended = False
        while True:
            self._sync_status(step, ended)
            if step == stop:
                self._profile.follow(step)
                if step > self.start:
                    self._log(step)
                self._evaluate(step)
            if step == stop or self.checkpoints.save_requested:
                self._save(step)
            if step >= schedule.last or self._signal:
                break
            before, stop = step, schedule.find_next_stop(step)
            step = min(stop, before + self._steps_per_call.limit)
            fetches = schedule.find_fetches(stop) if step == stop else frozenset()
            with (
                attribute_errors(state, self.functions, before),
                self._steps_per_call.measure(step - before) as steps,
            ):
                values = self.functions.take_steps(steps, fetches)
            self._run.steps_taken = step - self.start
            state.progress.examples += state.data.count_new_examples(steps)
            for passed, hook in schedule.find_deferred(range(before + 1, step + (step != stop))):
                chief = state.cluster.task.chief
                hook(step=passed, dev=self.functions.devices, chief=chief)
            if step == stop:
                ended = self._run_hooks(step, schedule.find_due(step), values)
        with state.clock.pause():
            self.checkpoints.save()
            self.checkpoints.wait()
        self.checkpoints.statistics.average()
        state.stopped_by = self._signal if step < schedule.last else None

    def _run_hooks(self, step: int, due: Sequence[Hook], values: dict[str, Any]) -> bool:
        """Runs host hooks after a step; returns whether one ends training."""
        state, ended = self.state, False
        if not due:
            return ended
        values = {
            "dev": self.functions.devices,
            "optimizer": state.optimizer,
            "ckpt": self.checkpoints.ckpt,
            "manager": self.checkpoints.manager,
            "chief": state.cluster.task.chief,
            "state": state.hook_state,
            **TraceContext(state.components, step=step).hook_values(),
            **values,
        }
        with self._run.summaries.open_writer("train").as_default(step=step):
            try:
                for hook in due:
                    with state.recording.watch(str(hook)):
                        hook(**values)
                    if "state" in hook.arguments:
                        check_hook_state(state.hook_state, str(hook))
            except StopTraining as asked:
                self._console.say(f"step {step}: a hook ends training. {asked}".rstrip())
                ended = True
        self.functions.refresh()
        return ended

    def _sync(self, status: LoopStatus, hook: Hook | None = None) -> LoopStatus:
        """Takes this process's status, adds the signal it received, and returns that of all."""
        received = self._signal or self._signals.received or 0
        hook = hook or self.state.hooks.create_dataset  # whose data have to be the same
        status = self.state.cluster.sync(dataclasses.replace(status, signal=received), hook)
        self._signal = status.signal
        return status

    def _sync_status(self, step: int, ended: bool) -> None:
        """Tells the other processes what this one knows after a graph call; all decide alike.

        Args:
            step: that was taken last
            ended: whether it is to be the last of all
        """
        flags, self.functions.flags = self.functions.flags, []
        noted = NonFinite()
        if flags and self.state.config.on_nan != "ignore":
            noted = NonFinite.from_flags(np.concatenate(flags), step)
        status = LoopStatus(
            steps_per_call=self._steps_per_call.limit,
            save=self.checkpoints.save_requested or self._schedule.is_time_to_save(),
            end=ended,
            step=step,
            frozen=self.functions.frozen,
            data=hash((self.state.data.digest, self._schedule.last)),
            first=noted.first,
            latest=noted.latest,
            bad=noted.steps,
        )
        if self.state.cluster.task.chief and self._schedule.is_time_to_end() and not self._signal:
            self._console.say("max_time is over.")
            self._signal = signal.SIGTERM
        status = self._sync(status)
        self._steps_per_call.limit = status.steps_per_call
        self.checkpoints.save_requested = status.save
        noted = NonFinite(status.first, status.latest, status.bad, noted.zeroed)
        record_nonfinite(self.state, noted, self._console)
        if status.end and step < self._schedule.last:
            self.state.progress.ended, self._schedule.last = self._schedule.last, step

    def _evaluate(self, step: int) -> None:
        """Evaluates, if that is due and not done; what its values decide is decided here."""
        state, progress, average = self.state, self.state.progress, self.state.average
        due = self._schedule.is_evaluation_due(step) and progress.evaluated != step
        if not due or state.evaluation is None:
            return
        # Hooks after it see the weights that the metrics are of.
        with average.replace_weights() if average else nullcontext():
            with (
                attribute_errors(state, self.functions, step),
                state.clock.pause(),
                self.checkpoints.statistics.hold_averages(),
            ):
                sync = functools.partial(self._sync, hook=state.hooks.create_eval_dataset)
                values = state.evaluation.evaluate(sync)
            if values is None:
                return
            progress.metrics, progress.evaluated = values, step
            self._console.values(step, "eval", values)
            why = None
            for criterion in self._criteria:
                why = criterion.judge(step, values, progress.best) or why
            self.checkpoints.save_requested |= find_best_step(progress.best) == step
            if why and step < self._schedule.last:
                self._console.say(f"step {step}: training ends. {why}")
            ended = self._run_hooks(step, state.hooks.after_eval, {"metrics": dict(values)})
        self._sync_status(step, ended or why is not None)

    def _log(self, step: int) -> None:
        """Shows the train metrics, if that is due; at the end of a period they begin anew.

        A run that ends within one keeps what it has, for when it goes on.
        """
        metrics = self.state.components.list_logged_metrics()
        is_due, is_whole = self._schedule.find_log_due(step)
        if is_due:
            self._console.values(step, "train", read_results(metrics))
        for metric in metrics.values() if is_whole else ():
            metric.reset_state()

    def _save(self, step: int) -> None:
        """Saves, if that is due: after the evaluation, whose values the checkpoint holds."""
        self.checkpoints.tell_saved()
        if self._schedule.is_save_due(step) or self.checkpoints.save_requested:
            with self.state.clock.pause():
                self.checkpoints.save()
            self._schedule.note_saved()

    def _check_step(self) -> None:
        """Traces the graphs that training begins with, so that their hooks are checked before."""
        state = self.state
        try:
            graph = self.functions.trace(self._schedule.find_fetches(self.start + 1)).graph
            if state.evaluation is not None:
                state.evaluation.trace()
        except HookFailed as error:
            raise SetupError(str(error)) from error.__cause__
        if found := find_random_ops(graph):
            self._console.warn(
                f"a hook or the model draws random numbers with {', '.join(found)}, whose state no "
                "checkpoint holds: use a keras.random.SeedGenerator, or tf.random.stateless_*."
            )
        self.checkpoints.check_written(graph)

    def run_at_end(self, reason: str) -> None:
        """Runs the hooks ``at_end``; where training has failed, what they raise is a warning."""
        values = {"reason": reason, "metrics": dict(self.state.metrics)}
        try:
            self._run_hooks(self.state.step, self.state.hooks.at_end, values)
        except RunError as error:
            if reason != "failed":
                raise
            self._console.warn(f"after a failure: {error}")
