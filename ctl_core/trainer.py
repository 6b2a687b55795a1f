"""The outer loop: chunks of steps inside one graph call, then the hooks that are due.

The inner loop is in the graph, see graph.py. Everything else happens here, between two calls:
hooks, evaluation, checkpoints, signals.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.build import State, create_state
from ctl_core.callbacks_file import source_of
from ctl_core.checkpoint import Checkpoints
from ctl_core.checks.data import EMPTY
from ctl_core.checks.sums import check_sums, divided_twice
from ctl_core.chunks import ChunkLength
from ctl_core.cluster.signals import SAME_SIGNAL, Agreement, Signals
from ctl_core.cluster.strategy import read_task
from ctl_core.cluster.supervisor import TICK, supervised
from ctl_core.cluster.sync import Word, peers
from ctl_core.console import LOG, Console, activate
from ctl_core.errors import CtlError, RunError, SetupError, StopTraining, not_compiled
from ctl_core.evaluate import evaluate
from ctl_core.files import from_here
from ctl_core.graph import StepFunctions
from ctl_core.hooks import OBSERVED
from ctl_core.numerics.learning_rate import why_ignored
from ctl_core.numerics.not_finite import NEVER, Noted
from ctl_core.numerics.precision import policy
from ctl_core.numerics.randomness import spread
from ctl_core.profile import Clock, Profile
from ctl_core.run_folder import Run
from ctl_core.run_state.hook_state import check_state
from ctl_core.schedule import Schedule
from ctl_core.settings import Config

# Between two checkpoints, metrics and summaries are put on the disk at most so often (seconds).
FLUSH_INTERVAL = 1.0


def train(callbacks: Any, config: Config, go_on: bool = False) -> State:
    """Trains until ``config.steps`` or ``config.epochs``, from the newest checkpoint if any.

    Args:
        callbacks: a module, or any object, with the hooks as attributes
        config: the settings
        go_on: whether to train on in a run that a hook has ended by ``StopTraining``, which
            otherwise takes more steps than it was to take then

    Returns:
        The trained state. ``stopped_by`` is set if a signal ended training early, ``ended`` if a
        hook did, ``diverged`` if the loss of the last step is not finite.

    Raises:
        SetupError: a setting or a hook cannot work; nothing was trained.
        RunError: a hook raised, or a step or a file failed; the last checkpoint stays usable.
        PeerLost: another process of the cluster is gone.
    """
    if config.workers > 1 and not os.environ.get("TF_CONFIG"):
        raise SetupError(f"workers: needs the command line: ./train.sh --workers {config.workers}")
    if config.steps is None and config.epochs is None:
        raise SetupError("steps: say how long to train, with steps or epochs.")
    task, source = read_task(config), source_of(callbacks)
    run, console = Run(config, task), Console(shown=task.chief)
    config = dataclasses.replace(config, run_name=run.path.name)  # also where it was made up
    with (
        session(run, console),
        policy(config.precision),
        peers(task),
        Signals(console, SAME_SIGNAL - 2 * TICK * supervised()) as signals,
    ):
        if task.chief:
            run.lock()
        state = create_state(callbacks, config, run, console)
        check_sums(state)
        if said := divided_twice(state):
            console.warn(said)
        checkpoints = Checkpoints(state, console)
        signals.settle = checkpoints.settle
        record = checkpoints.restore()
        spread(state.found.generators, state.strategy, task)
        start, last = state.step, _last_step(state, console)
        target = last
        if checkpoints.ended is not None:
            go_on = bool(state.cluster.exchange([go_on]).any())
            state.ended = start < last <= checkpoints.ended and not go_on
            if state.ended:
                last = start
            elif start < last:
                checkpoints.ended = None
        if record and record.learning_rate != config.learning_rate:
            console.say(f"learning_rate is {config.learning_rate:g} from here on.")
            state.lr.assign(config.learning_rate)
        state.functions = StepFunctions(state, console, run.graph_writer("train"))
        if start < last:
            checkpoints.remainder.check_step(state.functions.check())
        if task.chief:
            run.open(config, start, new=start < last, source=source)
            console.listeners.append(run.write)
        console.say(_opening(state, start, target, resumed=record is not None))
        console.start(start, last)
        profile = Profile(config.profile_steps if task.chief else None, run.path / "tb" / "train")
        state.clock = Clock()
        seconds = time.monotonic()
        try:
            _loop(state, checkpoints, run, console, signals, profile, last)
        finally:
            checkpoints.abandon()
            note = profile.end()
            state.clock.waited = state.data.seconds_waited(state.step - start)
        run.flush()
        console.stop()
        if note:
            console.say(note)
        if start < last:
            console.say(state.clock.summary())
        if complaint := _not_finite(state):
            console.warn(complaint)
        console.say(_closing(state, start, last, time.monotonic() - seconds))
    return state


def _loop(
    state: State,
    checkpoints: Checkpoints,
    run: Run,
    console: Console,
    signals: Signals,
    profile: Profile,
    last: int,
) -> None:
    """Trains to step ``last``: a chunk, then what is due, then the next chunk."""
    schedule = Schedule(state.hooks, state.config, last, profile.marks)
    chunk = ChunkLength(state.config.max_chunk)
    functions: StepFunctions = state.functions
    agree = Agreement(state.cluster, signals)
    step = state.step
    clock = state.clock
    agree(Word(chunk=chunk.limit, step=step, frozen=functions.frozen))
    _evaluate_and_save(state, step, checkpoints, run, console, agree, schedule)
    profile.at(step)
    while step < last and not agree.signal:
        stop = schedule.next_stop(step)
        due = schedule.due(stop)
        wanted = frozenset(name for hook in due for name in hook.arguments if name in OBSERVED)
        before, values, end = step, {}, False
        with _blame(state, step), clock.time("steps"):
            if stop == step + 1 and (wanted or schedule.every_step):
                values = functions.observe(wanted, due)
                step += 1
            else:
                steps = min(stop - step - bool(wanted), chunk.limit)
                with chunk.timed(steps):
                    functions.run(steps)
                step += steps
        checkpoints.examples += (step - before) * state.config.batch_size
        with clock.time("hooks"):
            for passed in range(before + 1, step + (step != stop)):
                for hook in schedule.deferred(passed):
                    hook(step=passed, dev=functions.devices, chief=state.cluster.task.chief)
            if step == stop:
                with run.writer("train").as_default(step=step):
                    try:
                        for hook in due:
                            hook(**_host_values(state, functions, step), **values)
                            if why := why_ignored(state.parts.optimizers):
                                raise RunError(f"{hook.name} ({hook.where}): {why}.")
                            if "state" in hook.arguments:
                                check_state(state.hook_state, f"{hook.name} ({hook.where})")
                    except StopTraining as asked:
                        console.say(f"step {step}: a hook ends training. {asked}".rstrip())
                        end = True
                checkpoints.done.update(n for n in state.hooks.at_step if n == step)
                functions.refresh()
                checkpoints.remainder.after_hooks(due, step)
        state.data.say_left_out(console)
        checkpoints.poll()
        word = Word(chunk.limit, 0, checkpoints.asked, end, False, step, functions.frozen)
        if noted := functions.noted:
            word = dataclasses.replace(
                word, first=noted.first, latest=noted.latest, bad=noted.steps
            )
        word = agree(word)
        chunk.limit, checkpoints.asked = word.chunk, word.save
        if noted:
            noted = Noted(word.first, word.latest, word.bad, noted.zeroed)
            _look_at_losses(state, noted, checkpoints, console)
        if word.end:
            if step < last:
                state.ended, checkpoints.ended = True, last
            schedule.end_at(step)
            last = step
        if step == stop:
            if note := profile.at(step):
                console.say(note)
            _evaluate_and_save(state, step, checkpoints, run, console, agree, schedule)
    run.flush()
    with clock.time("checkpoints"):
        checkpoints.save(due=True)
        checkpoints.finish()
    if not agree.signal:
        state.data.say_left_out(console, ended=True)
    with state.cluster.peers():
        state.statistics.average()
    state.stopped_by = agree.signal if step < last else None


def _look_at_losses(state: State, found: Noted, checkpoints: Checkpoints, console: Console) -> None:
    """Notes what a graph call has found, and says so at the first loss that is not finite.

    Raises:
        RunError: training is to stop there; checkpoints are of earlier steps.
    """
    before, state.noted = state.noted, state.noted.then(found)
    if found.steps and state.config.on_nan == "stop":
        saved = checkpoints.saved_step
        raise RunError(
            f"the loss of step {found.first} is not finite (on_nan: stop); "
            + (f"the last checkpoint is of step {saved}." if saved >= 0 else "nothing was saved.")
        )
    if found.steps and before.first == NEVER:
        console.warn(
            f"the loss of step {found.first} is not finite; on_nan: stop would end training there."
        )
    if found.zeroed and not before.zeroed and state.noted.first == NEVER:
        console.warn(
            f"by step {state.step}, update_pre has turned NaN in gradients into 0; how often is "
            "said at the end."
        )


def _not_finite(state: State) -> str | None:
    """Says, at the end, in how many steps losses or gradients were not finite."""
    noted, parts = state.noted, []
    if noted.steps:
        at_least = "at least " * (state.cluster.task.processes > 1)
        parts.append(
            f"the loss was not finite in {at_least}{noted.steps} of {state.step} steps, from "
            f"{noted.first} to {noted.latest}{', the last one' * state.diverged}"
        )
    if noted.zeroed:
        parts.append(
            f"update_pre turned NaN in gradients into 0 in {noted.zeroed} of {state.step} steps"
        )
    return f"{'; '.join(parts)}." if parts else None


def _host_values(state: State, functions: StepFunctions, step: int) -> dict[str, Any]:
    """What a host hook may name besides the observed values."""
    return {
        "dev": functions.devices,
        "step": step,
        "optimizer": state.optimizer,
        "ckpt": state.ckpt,
        "manager": state.manager,
        "chief": state.cluster.task.chief,
        "state": state.hook_state,
        **state.parts.given(),
    }


def _evaluate_and_save(
    state: State,
    step: int,
    checkpoints: Checkpoints,
    run: Run,
    console: Console,
    agree: Agreement,
    schedule: Schedule,
) -> None:
    """Evaluates if that is due and not done, then saves: a checkpoint holds what came before."""
    if state.evaluation and schedule.evaluation_due(step) and checkpoints.evaluated != step:
        with (
            _blame(state, step),
            state.clock.time("evaluation"),
            state.statistics.averaged(),
        ):
            values = evaluate(state.evaluation, agree)
        if values is not None:
            state.metrics = values
            checkpoints.evaluated = step
            console.values(step, "eval", values)
    due = schedule.save_due(step)
    saving = due or checkpoints.asked
    run.flush(0.0 if saving else FLUSH_INTERVAL)
    if saving:
        with state.clock.time("checkpoints"):
            checkpoints.save(due=due)


@contextmanager
def session(run: Run, console: Console) -> Iterator[None]:
    """Opens the run's log and console, and closes them however the run ends."""
    activate(console)
    step_of_summaries = tf.summary.experimental.get_step()
    try:
        yield
    except CtlError as error:
        LOG.error(str(error), exc_info=error.__cause__ or error)
        raise
    except BaseException as error:
        LOG.error("failed", exc_info=error)
        raise
    finally:
        tf.summary.experimental.set_step(step_of_summaries)
        console.stop()
        activate(None)
        run.close()


@contextmanager
def _blame(state: State, step: int) -> Iterator[None]:
    """Turns a failure of TensorFlow's inside a graph call into one line that names the hook."""
    hooks = state.hooks
    try:
        yield
    except tf.errors.OutOfRangeError as error:
        where = f"create_dataset ({hooks.create_dataset.where})"
        if step == 0:
            raise SetupError(f"{where}: {EMPTY}") from error
        raise RunError(f"{where}: the training data ended after step {step}.") from error
    except tf.errors.OpError as error:
        with state.cluster.peers():
            if state.cluster.lost(error):
                raise
        if state.config.jit_compile and (why := not_compiled(error)):
            raise SetupError(f"jit_compile: {why}; leave it out.") from error
        raise RunError(f"{hooks.blame(error)}, after step {step}.") from error


def _last_step(state: State, console: Console) -> int:
    """Returns the step at which training ends.

    Raises:
        SetupError: epochs are asked for, but the data has no end.
    """
    if state.config.epochs is None:
        assert state.config.steps is not None
        return state.config.steps
    steps = state.data.steps_per_epoch
    if steps is None:
        raise SetupError(
            "epochs: create_dataset or make_batches gives an endless dataset, which has no "
            "epochs; use steps."
        )
    console.say(f"an epoch has {steps} steps.")
    return steps * state.config.epochs


def _opening(state: State, start: int, last: int, resumed: bool) -> str:
    config, replicas, run = state.config, state.parts.replicas, from_here(state.run_dir)
    batch = f"batch size {config.batch_size}"
    if config.accumulate_steps > 1:
        batch += f" in {config.accumulate_steps} micro-batches"
    where = f"{replicas} replica{'s' * (replicas > 1)} on {_devices(state)}"
    if state.computed_in:
        where += f", in {' and '.join(state.computed_in)}"
    if state.ended:
        return (
            f"{run}: a hook ended it at step {start} of {last}, nothing left to train; "
            "more steps, or --continue, let it go on."
        )
    if start >= last:
        return f"{run}: at step {start} of {last} already, nothing left to train."
    doing = f"resuming at step {start}" if resumed else "training"
    return f"{run}: {doing}, to step {last}, {batch}, {where}."


def _devices(state: State) -> str:
    kinds = [device.split("device:")[-1].split(":")[0] for device in state.functions.devices]
    return ", ".join(sorted(set(kinds)))


def _closing(state: State, start: int, last: int, seconds: float) -> str:
    step = state.step
    values = "  ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
    parts = [f"step {step}", f"{step - start} steps in {seconds:.1f} s"]
    if values:
        parts.append(f"evaluation: {values}")
    if state.stopped_by is not None:
        name = signal.Signals(state.stopped_by).name
        again = f"--run-name {Path(state.run_dir).name}"
        head = f"stopped by {name}, saved; goes on from here with {again}"
    else:
        head = "ended by a hook" if state.ended else "done"
    return f"{head}: {'; '.join(parts)}. Everything is in {from_here(state.run_dir)}"
