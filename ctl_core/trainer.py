"""The outer loop of training: alternates between graph calls and everything that is then due.

A graph call takes many steps, in the inner loop of graph.py. Host hooks, evaluations, checkpoints
and signals are handled here, between two graph calls.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ctl_core.checkpoint.checkpoints import Checkpoints, check_written, describe_unknown_state
from ctl_core.checkpoint.record import Record, find_best_step
from ctl_core.checkpoint.stateful_ops import list_stateful_ops
from ctl_core.cluster.background import tell_step
from ctl_core.cluster.signals import Signals
from ctl_core.cluster.sync import LoopStatus
from ctl_core.compilation import choose_functions
from ctl_core.evaluation.criteria import read_criteria
from ctl_core.evaluation.summaries import Pace, Profile, read_rates
from ctl_core.graph import begin_reading
from ctl_core.hooks.hooks import Hook
from ctl_core.hooks.recording import LateObject, drop_discarded
from ctl_core.model.components import TraceContext
from ctl_core.model.failures import attribute_errors
from ctl_core.model.linearity import check_division
from ctl_core.model.logical_limits import refuse_ops
from ctl_core.model.metrics import read_results
from ctl_core.model.state import Clock, State, check_created, check_hook_state
from ctl_core.numerics.not_finite import NEVER, NonFinite
from ctl_core.numerics.randomness import find_random_ops
from ctl_core.numerics.report import Report
from ctl_core.run.console import Console
from ctl_core.run.errors import CompilationFailed, HookFailed, RunError, SetupError, StopTraining
from ctl_core.schedule import MOST_STEPS, Schedule, StepsPerCall, convert_epochs
from ctl_core.session.messages import (
    count_parameters,
    describe_compilation_change,
    describe_end,
    describe_free_order,
    describe_left_out,
    describe_new_leaves,
    describe_nonfinite,
    describe_resources,
    describe_start,
    describe_weighting,
)
from ctl_core.session.run import Run
from ctl_core.session.turns import PROCESS_TURN
from ctl_core.session.watch import Watch

# This advice is printed when a run with several replicas starts from scratch.
CHECK_ADVICE = (
    "If the loss of an example depends on other rows of the batch, try --check first: it compares "
    "one device with three."
)


class Trainer:
    """Trains one run in this process, together with the other processes if it is in a cluster.

    Attributes:
        state: the components of the run, and its progress
        start: the step at which this process starts to train
        checkpoints: the checkpoints of the run
        functions: the graph functions that take steps
    """

    def __init__(
        self,
        state: State,
        run: Run,
        console: Console,
        signals: Signals,
        watch: Watch | None = None,
        started: float | None = None,
    ) -> None:
        """Prepares training. The run is opened and the console is started when training begins.

        Args:
            state: the state of the run
            run: the folder of the run
            console: prints messages
            signals: records signals
            watch: reports training that hangs; default: a watch without a time limit
            started: the time at which the command was started, as ``time.monotonic`` returns it;
                default: now

        Raises:
            SetupError: the resumed run is compiled, but cannot be compiled here.
        """
        self.state = state
        self.start = 0
        begun_compiled = None
        if run.source is not None:
            begun_compiled = run.source.find_compiled()
        summaries = run.summaries.make_graph_writer("train")
        self.functions = choose_functions(state, summaries, begun_compiled)
        if begun_compiled not in (None, state.compilation.is_compiled):
            console.say(describe_compilation_change(state))
        self.checkpoints = Checkpoints(state, console)
        self._run = run
        self._console = console
        self._signals = signals
        self._watch = watch or Watch(run, console, signals, state.cluster.task, stall_seconds=0)
        self._creating_hooks: set[str] = set()  # the hooks that have created layers or variables
        self._signal = 0  # the signal that ends training on every process, or 0
        self._steps_per_call = StepsPerCall(1 if state.config.detect_anomaly else MOST_STEPS)
        profiled_steps = ""
        if state.cluster.task.chief and state.config.profile is not None:
            profiled_steps = state.config.profile
        self._profile = Profile(profiled_steps, run.path / "tb" / "train")
        seconds_before = 0.0
        if started is not None:
            seconds_before = time.monotonic() - started
        self._schedule = Schedule(state, self._profile.marks, seconds_before)
        metric_names = state.evaluation.names if state.evaluation else ()
        self._criteria = read_criteria(state.config, metric_names)
        # This comes last: if the constructor raises an error, nobody can call ``close``.
        begin_reading(state.data, state.compilation.parts)

    def close(self) -> None:
        """Ends the reading of training data; afterwards, the trainer takes no more steps.

        The caller may keep the state after training, and a traceback may keep the trainer. Neither
        may keep the iterator over the training data, see ``end_reading_at_exit``.
        """
        self.functions.discard()
        self.state.data.end()

    def restore(self, go_on: bool = False) -> None:
        """Restores the checkpoint that the run starts from, and determines the last step to take.

        Args:
            go_on: whether to continue a run that was ended early

        Raises:
            SetupError: the checkpoint does not fit the model, or the number of steps is not known.
        """
        state = self.state
        config = state.config
        record = self.checkpoints.restore(self._run.source)
        self.start = state.step
        change = describe_new_leaves(state, record)
        if change is not None:
            self._console.say(change)
        self._note_passes(record)
        last = config.steps
        if config.epochs is not None:
            convert_epochs(state, "epochs", config.epochs)  # rejects endless data
            last = state.progress.find_step(config.epochs)
            self._console.say(f"an epoch has {state.data.steps_per_epoch} steps.")
        assert last is not None
        if state.ended:
            self._continue_ended_run(last, go_on)
        self._restore_learning_rate(record, last)
        self._schedule.last = last
        self.functions.refresh()

    def _note_passes(self, record: Record | None) -> None:
        """Notes the passes that were made, if a pass now has another number of steps than before.

        In this case, a line is printed.
        """
        progress = self.state.progress
        steps = self.state.data.steps_per_pass
        before = progress.change_steps_per_pass(self.start, steps)
        if record is None or before is None:
            return
        text = f"a pass over the data has {steps} steps now, and had {before} until now"
        if self.checkpoints.position.has_same_batches(record):
            text = f"{self.state.data.hook}: the size of the dataset has changed: {text}"
        self._console.say(f"{text}; {progress.passes:.6g} passes were made.")

    def _restore_learning_rate(self, record: Record | None, last: int) -> None:
        """Sets the learning rate if the settings have changed it since the checkpoint.

        The change is printed.

        Args:
            record: the record of the checkpoint; None if the run starts from scratch
            last: the last step of the run, at which a schedule ends
        """
        learning_rate = self.state.learning_rate
        schedule = learning_rate.schedule
        if schedule is not None:
            schedule.last = last
        if record is None:
            return
        if schedule is not None and self.start < last and not self.state.ended:
            jump = schedule.describe_jump(self.start, record.learning_rate)
            if jump is not None:
                self._console.warn(jump)
        setting = self.state.config.learning_rate
        if record.learning_rate != setting:
            if learning_rate.is_used:
                self._console.say(f"learning_rate is {setting:g} from now on.")
            learning_rate.variable.assign(setting)

    def _continue_ended_run(self, last: int, go_on: bool) -> None:
        """Continues a run that was ended early, if ``go_on`` is set or the run has more steps now.

        Args:
            last: the last step of the run
            go_on: whether the user wants to continue the run
        """
        progress = self.state.progress
        assert progress.planned_last is not None
        go_on = bool(self.state.cluster.gather([go_on]).any())
        if self.start < last and (go_on or last > progress.planned_last):
            progress.planned_last = None
            for criterion_state in progress.best.values():
                criterion_state[2] = 0  # early_stop starts to count evaluations again

    def train(
        self,
        hooks_file: bytes | None = None,
        read_modules: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        """Trains the run to its last step, and prints how training begins and ends.

        Args:
            hooks_file: the content of the file with the hooks; the run saves a copy of it
            read_modules: returns the content of the modules that the hooks import, by path; the run
                saves copies of them
        """
        state = self.state
        run = self._run
        console = self._console
        schedule = self._schedule
        going_on = self.start < schedule.last and not state.ended
        if going_on:
            self._check_step()
        if state.cluster.task.chief and (going_on or not run.config_file.exists()):
            run.listeners.candidates.append(Pace(state, run.summaries))
            compilation = str(state.compilation)
            run.open(
                state.config,
                self.start,
                hooks_file,
                read_modules(),
                self.functions.devices,
                compilation,
            )
            console.listeners = run.listeners
            console.read_rates = functools.partial(read_rates, state)
        self._print_start(going_on)
        if not going_on:
            schedule.last = min(self.start, schedule.last)
        state.clock = Clock()
        self._start_progress()
        try:
            with state.recording.watch_layers():
                self._loop()
        except Exception:
            self.run_at_end("failed")
            raise
        else:
            ending = self._name_ending()
            if going_on:
                self.run_at_end(ending)
        finally:
            self.checkpoints.close()
            self._profile.end()
        console.stop()
        for warning in describe_nonfinite(state):
            console.warn(warning)
        for line in describe_end(state, self.start, self.checkpoints.saved_step):
            console.say(line)
        if state.diverged and ending != "stopped":
            ending = "diverged"
        run.end(ending)

    def _start_progress(self) -> None:
        """Starts the progress line of the console."""
        state = self.state
        steps_per_epoch = None
        passes_before = 0.0
        if state.config.epochs is not None:
            steps_per_epoch = state.data.steps_per_epoch
            passes_before = state.progress.count_passes(self.start)
        self._console.start(
            self.start,
            self._schedule.last,
            state.clock.measure_training,
            steps_per_epoch,
            state.config.log_seconds,
            passes_before,
        )

    def _print_start(self, going_on: bool) -> None:
        """Prints how training begins; ``going_on`` says whether there are steps left to take."""
        self._console.say(describe_start(self.state, self.start, self._schedule.last))
        if not going_on:
            return
        for line in describe_resources(self.state):
            self._console.say(line)
        if self.start == 0:
            self._console.say(f"the model has {count_parameters(self.state)}.")
            weighting = describe_weighting(self.state)
            if weighting is not None:
                self._console.say(weighting)
            for warning in describe_left_out(self.state):
                self._console.warn(warning)
            shape = self.state.components.shape
            if shape.replicas > 1 and shape.logical_replicas is None:
                # The checks before training do not find every loss of an example that depends on
                # other rows of the batch.
                self._console.say(CHECK_ADVICE)

    def _name_ending(self) -> str:
        """Returns a word that says how training ended, for the hooks ``at_end`` and listeners."""
        if self.state.stopped_by:
            return "stopped"
        if self.state.ended:
            return "ended"
        return "done"

    def _loop(self) -> None:
        """Takes the steps of the run, and does everything that is due after them.

        Returns after the last step, or when a signal ends training. In both cases, a checkpoint of
        the last step that was taken is saved.
        """
        state = self.state
        schedule = self._schedule
        step = self.start
        # The next step after which something is due. Before the first step, the loop makes the
        # evaluation that was due when an earlier process was stopped.
        stop = self.start
        has_ended = False
        self._watch.step = step
        while True:
            # Hooks have run already. Everything else that is due after a step waits until the
            # processes have exchanged their status: signals, and losses that are not finite.
            self._sync_status(step, has_ended)
            if step == stop:
                self._profile.follow(step)
                if step > self.start:
                    self._log(step)
                self._evaluate(step)
            if step == stop or self.checkpoints.is_save_wanted:
                self._save(step)
            if step >= schedule.last or self._signal:
                break
            with state.clock.pause():
                PROCESS_TURN.offer()
            stop = schedule.find_next_stop(step)
            step, has_ended = self._advance(step, stop)
        with state.clock.pause():
            self.checkpoints.save()
            self.checkpoints.wait()
        if step < schedule.last:
            state.stopped_by = self._signal

    def _advance(self, before: int, stop: int) -> tuple[int, bool]:
        """Takes steps in one graph call, and runs the hooks that are due after them.

        Args:
            before: the last step that was taken before the call
            stop: the next step after which something is due. If it is too far away for one call,
                the call takes only the first steps.

        Returns:
            The last step of the call, and whether a hook has ended training.
        """
        state = self.state
        step = min(stop, before + self._steps_per_call.limit)
        steps = step - before
        reaches_stop = step == stop
        fetches: frozenset[str] = frozenset()
        if reaches_stop:
            fetches = self._schedule.find_fetches(step)
        graphs_called = len(self.functions.called)
        with (
            attribute_errors(state, self.functions, before, self.functions.repeat_failure),
            self._steps_per_call.measure(steps),
        ):
            values = self.functions.take_steps(steps, fetches)
        self._run.steps_taken = step - self.start
        self._watch.step = step
        tell_step()
        state.progress.examples += state.data.count_new_examples(steps)
        has_ended = False
        if reaches_stop:
            # Deferred hooks that are due after the last step of the call run together with the
            # other due hooks, so that all of them run in order.
            self._run_deferred_hooks(range(before + 1, step))
            has_ended = self._run_hooks(step, self._schedule.find_due(step), values)
        else:
            self._run_deferred_hooks(range(before + 1, step + 1))
        self._console.advance(step, is_warm=len(self.functions.called) == graphs_called)
        return step, has_ended

    def _run_deferred_hooks(self, steps: range) -> None:
        """Runs the deferred hooks that were due after the given steps of a graph call."""
        chief = self.state.cluster.task.chief
        with self._console.defer():
            for step, hook in self._schedule.find_deferred(steps):
                hook(step=step, dev=self.functions.devices, chief=chief)

    def _run_hooks(
        self, step: int, due: Sequence[Hook], values: dict[str, Any], at_end: bool = False
    ) -> bool:
        """Runs host hooks after a step, and returns whether a hook has ended training.

        Args:
            step: the step
            due: the hooks
            values: arguments of the hooks, in addition to those that all host hooks can take
            at_end: whether training has ended, so that no checkpoint follows
        """
        if not due:
            return False
        state = self.state
        ended = False
        created_in_step: list[LateObject] = []
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
                    with (
                        state.recording.watch(str(hook)) as created,
                        self._console.defer(hook.deferred),
                    ):
                        hook(**values)
                    if not at_end:
                        check_created(state, created)
                        created_in_step += created
                    if "state" in hook.arguments:
                        check_hook_state(state.hook_state, str(hook))
            except StopTraining as request:
                self._console.say(f"step {step}: a hook ends training. {request}".rstrip())
                ended = True
        self._warn_of_kept(created_in_step)
        self.functions.refresh()
        return ended

    def _warn_of_kept(self, created: list[LateObject]) -> None:
        """Warns of variables that a hook has created, and that still exist after the hook.

        Each hook is looked at only once, because the garbage collection takes time.

        Args:
            created: what the hooks of a step have created
        """
        new = [late for late in created if late.hook not in self._creating_hooks]
        self._creating_hooks.update(late.hook for late in new)
        for late in drop_discarded([late for late in new if late.is_variable])[:1]:
            self._console.warn(
                f"{late.hook}: creates {late.name} during training. If it still exists when the "
                "next checkpoint is due, the run ends, because no checkpoint would restore it; "
                "create it in create_model, or keep numbers in state."
            )

    def _sync(self, status: LoopStatus, hook: Hook | None = None) -> LoopStatus:
        """Exchanges the status of this process with the others; returns their combined status.

        Args:
            status: the status of this process; this function adds the signal that was received
            hook: the hook to name if the data of the processes differ; default: create_dataset
        """
        self._watch.note_end()
        received = self._signal or self._signals.received or 0
        hook = hook or self.state.hooks.create_dataset
        status = self.state.cluster.sync(dataclasses.replace(status, signal=received), hook)
        self._signal = status.signal
        return status

    def _sync_status(self, step: int, ended: bool) -> None:
        """Exchanges the status with the other processes, so that all make the same decisions.

        Args:
            step: the last step that was taken
            ended: whether training ends after this step
        """
        reports = self.functions.reports
        self.functions.reports = []
        noted = NonFinite()
        if reports and self.state.config.on_nan != "ignore":
            noted = NonFinite.from_report(Report.unpack(np.concatenate(reports)), step)
        status = LoopStatus(
            steps_per_call=self._steps_per_call.limit,
            save=self.checkpoints.is_save_wanted or self._schedule.is_time_to_save(),
            end=ended,
            step=step,
            frozen=self.functions.frozen,
            data=hash((self.state.data.digest, self._schedule.last)),
            first=noted.first,
            latest=noted.latest,
            bad=noted.steps,
        )
        is_time_to_end = step > self.start and self._schedule.is_time_to_end()
        if self.state.cluster.task.chief and is_time_to_end and not self._signal:
            self._console.say("max_time is over.")
            self._signal = signal.SIGTERM
        status = self._sync(status)
        self._steps_per_call.limit = status.steps_per_call
        self.checkpoints.is_save_wanted = status.save
        noted = NonFinite(status.first, status.latest, status.bad, noted.nan_gradients)
        self._record_nonfinite(noted)
        if status.end and step < self._schedule.last:
            self.state.progress.planned_last = self._schedule.last
            self._schedule.last = step

    def _record_nonfinite(self, noted: NonFinite) -> None:
        """Records losses and gradients that are not finite, and warns of the first such loss.

        Args:
            noted: the summary of the steps of a graph call

        Raises:
            RunError: ``on_nan`` is stop, and a loss is not finite.
        """
        progress = self.state.progress
        is_first = progress.noted.first == NEVER
        progress.noted = progress.noted.merge_later(noted)
        if not noted.steps:
            return
        if self.state.config.on_nan == "stop":
            raise RunError(f"the loss of step {noted.first} is not finite (on_nan: stop).")
        if is_first:
            self._console.warn(
                f"the loss of step {noted.first} is not finite; --detect-anomaly finds the op, "
                "layer and line from which it comes, and --on-nan stop ends training there."
            )

    def _evaluate(self, step: int) -> None:
        """Evaluates the model if that is due.

        The values decide whether a checkpoint is saved and whether training ends.
        """
        state = self.state
        progress = state.progress
        is_due = self._schedule.is_evaluation_due(step) and progress.evaluated != step
        if not is_due or state.evaluation is None:
            return
        begun = time.monotonic()
        # The averaged weights stay in place until the hooks after_eval have run, so that these
        # hooks see the weights that were evaluated.
        with self._replace_weights():
            values = self._compute_values(step)
            if values is None:
                return
            progress.metrics = values
            progress.evaluated = step
            reason = self._judge(step, values, time.monotonic() - begun)
            metrics = {**values, **state.evaluation.arrays}
            ended = self._run_hooks(step, state.hooks.after_eval, {"metrics": metrics})
        self._sync_status(step, ended or reason is not None)

    def _replace_weights(self) -> AbstractContextManager[None]:
        """Returns a context in which the averaged weights replace the weights, if there are any."""
        if self.state.average is None:
            return nullcontext()
        return self.state.average.replace_weights()

    def _compute_values(self, step: int) -> dict[str, float] | None:
        """Returns the values of an evaluation by name; None if a signal has ended it."""
        state = self.state
        sync = functools.partial(self._sync, hook=state.hooks.create_eval_dataset)
        with (
            attribute_errors(state, self.functions, step, state.evaluation.repeat_failure),
            state.clock.pause(),
        ):
            values: dict[str, float] | None = state.evaluation.evaluate(sync)
        return values

    def _judge(self, step: int, values: dict[str, float], seconds: float) -> str | None:
        """Compares an evaluation with the best ones so far, and prints its values.

        Requests a checkpoint if the evaluation is the best by the criterion of ``keep_best``.

        Args:
            step: the step of the evaluation
            values: its values by name
            seconds: its duration

        Returns:
            The reason why training ends after this step; None if it continues.
        """
        best = self.state.progress.best
        problem = self.state.evaluation.problem
        reason = None
        remark = f"in {seconds:.1f} s"
        if not problem:
            for criterion in self._criteria:
                reason = criterion.judge(step, values, best) or reason
            improved = [
                criterion.metric for criterion in self._criteria if best[criterion.key][1] == step
            ]
            if improved:
                remark += f"  best {', '.join(dict.fromkeys(improved))} so far"
        self._console.values(step, "eval", values, remark=remark)
        if problem:
            self._console.warn(problem)
        self.checkpoints.is_save_wanted |= find_best_step(best) == step
        if reason and step < self._schedule.last:
            self._console.say(f"step {step}: training ends. {reason}")
        return reason

    def _log(self, step: int) -> None:
        """Logs the training metrics if that is due, and resets them at the end of a period.

        If the run ends within a period, the metrics keep their values, so that a resumed run can
        finish the period.
        """
        metrics = self.state.components.list_logged_metrics()
        is_due, is_whole_period = self._schedule.find_log_due(step)
        if is_due:
            self._console.values(step, "train", read_results(metrics).scalars, prefix="train ")
        if is_whole_period:
            for metric in metrics.values():
                metric.reset_state()

    def _save(self, step: int) -> None:
        """Saves a checkpoint if one is due or requested.

        This happens after the evaluation, because the checkpoint contains its values.
        """
        self.checkpoints.tell_saved()
        if self._schedule.is_save_due(step) or self.checkpoints.is_save_wanted:
            with self.state.clock.pause():
                is_saved = self.checkpoints.save()
            if is_saved:
                self._console.note_saved(step)
            self._watch.note_end()
            self._schedule.note_saved()

    def _check_step(self) -> None:
        """Traces the first graphs of training, so that their hooks are checked before it begins."""
        state = self.state
        try:
            graph = self.functions.trace(self._schedule.find_fetches(self.start + 1)).graph
            if state.evaluation is not None:
                state.evaluation.trace()
        except (CompilationFailed, HookFailed) as error:
            raise SetupError(str(error)) from error.__cause__
        if state.config.logical_replicas is not None:
            refuse_ops(state.hooks, graph)
            if state.evaluation is not None:
                for evaluation_graph in state.evaluation.list_graphs():
                    refuse_ops(state.hooks, evaluation_graph)
        check_division(state, self._console)
        if state.data.has_free_order():
            self._console.warn(describe_free_order(state))
        random_ops = find_random_ops(graph)
        if random_ops:
            self._console.warn(
                f"a hook or the model draws random numbers with {', '.join(random_ops)}, whose "
                "state is not in checkpoints; use a keras.random.SeedGenerator, or "
                "tf.random.stateless_*."
            )
        stateful_ops = list_stateful_ops(graph)
        check_written(state, graph, stateful_ops)
        unknown = describe_unknown_state(state, graph, stateful_ops)
        if unknown is not None:
            self._console.warn(unknown)

    def run_at_end(self, reason: str) -> None:
        """Runs the hooks ``at_end``.

        Args:
            reason: how training ended; if it is ``failed``, errors of the hooks become warnings
        """
        values = {"reason": reason, "metrics": dict(self.state.metrics)}
        try:
            self._run_hooks(self.state.step, self.state.hooks.at_end, values, at_end=True)
        except RunError as error:
            if reason != "failed":
                raise
            self._console.warn(f"after a failure: {error}")
