"""What a run says of itself: where it begins, how far it goes, what has failed, how it ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from ctl_core.anomaly import describe_anomaly
from ctl_core.batches import describe_shortage
from ctl_core.console import Console, format_evaluation
from ctl_core.errors import RunError, SetupError, not_compiled, unknown_to_xla
from ctl_core.files import from_here
from ctl_core.helpers import DIFFER
from ctl_core.numerics.not_finite import NEVER, Noted
from ctl_core.source_lines import frames_of
from ctl_core.state import State
from ctl_core.summary import describe_nature, describe_parameters


def last_step(state: State, console: Console) -> int:
    """Returns the step at which training ends; says how long an epoch is.

    Raises:
        SetupError: epochs are asked for, but the data has no end.
    """
    config, steps = state.config, state.data.source.steps_per_epoch
    if config.epochs is None:
        assert config.steps is not None
        return config.steps
    if steps is None:
        raise SetupError(
            "epochs: create_dataset or make_batches gives an endless dataset, which has no "
            "epochs; use steps."
        )
    console.say(f"an epoch has {steps} steps.")
    return steps * config.epochs


def announce(state: State, console: Console, start: int, last: int, resumed: bool) -> None:
    """Says where training begins, how far it goes, and on what; of a new run, on which model."""
    console.say(opening(state, start, last, resumed))
    if (batches := state.config.overfit_batches) and start < last and not state.ended:
        console.say(
            f"overfit_batches: only the first {batches} global batch{'es' * (batches > 1)} "
            f"{'are' if batches > 1 else 'is'} trained on, over and over."
        )
    if start < last and not state.ended and not resumed:
        model = describe_parameters(state.recording, state.train_model, state.train_loss)
        console.say(f"the model has {model}.")
        nature = describe_nature(state.recording)
        if nature and state.parts.shape.replicas > 1:
            console.say(nature)


def conclude(state: State, start: int, seconds: float, trained: bool, console: Console) -> None:
    """Says where the time went, what went wrong, how it all ended."""
    if trained:
        console.say(state.clock.summary())
    if complaint := not_finite(state):
        console.warn(complaint)
    console.say(closing(state, start, seconds))


def name_ending(state: State) -> str:
    """Returns how training has ended, in the word that listeners hear."""
    if state.stopped_by is not None:
        return "stopped"
    return "diverged" if state.diverged else "ended" if state.ended else "done"


def opening(state: State, start: int, last: int, resumed: bool) -> str:
    """Says where training begins, how far it goes, and on what."""
    config, replicas, run = state.config, state.parts.shape.replicas, from_here(state.run_dir)
    batch = f"batch size {config.batch_size}"
    if config.accumulate_steps > 1:
        batch += f" in {config.accumulate_steps} micro-batches"
    kinds = {d.split("device:")[-1].split(":")[0] for d in state.strategy.extended.worker_devices}
    where = f"{replicas} replica{'s' * (replicas > 1)} on {', '.join(sorted(kinds))}"
    if state.computed_in:
        where += f", in {' and '.join(state.computed_in)}"
    if state.ended:
        return (
            f"{run}: ended early, at step {start} of {last}, nothing left to train; "
            "more steps, or --continue, let it go on."
        )
    if last == 0:
        does = "evaluated and saved" if state.evaluation else "saved"
        return (
            f"{run}: to step 0, nothing to train; the model is {does} as it begins; with more "
            "steps it goes on."
        )
    if start >= last:
        counted = f" (those of {config.fork} count)" * (config.fork is not None)
        return (
            f"{run}: at step {start} of {last} already{counted}, nothing left to train; with more "
            "steps it goes on."
        )
    doing = f"resuming at step {start}" if resumed else "training"
    return f"{run}: {doing}, to step {last}, {batch}, {where}."


def closing(state: State, start: int, seconds: float) -> str:
    """Says how training has ended, after how many steps and with what evaluation."""
    parts = [f"step {state.step}", f"{state.step - start} steps in {seconds:.1f} s"]
    if state.metrics:
        parts.append(format_evaluation(state.metrics, state.progress.evaluated, state.step))
    if state.stopped_by is not None:
        name = signal.Signals(state.stopped_by).name
        again = f"--run-name {Path(state.run_dir).name}"
        name = "max_time" if state.timed_out else name
        head = f"stopped by {name}, saved; goes on from here with {again}"
    else:
        head = "ended early" if state.ended else "done"
    return f"{head}: {'; '.join(parts)}. Everything is in {from_here(state.run_dir)}"


def note_losses(state: State, found: Noted, saved: int, console: Console) -> None:
    """Notes what a graph call has found, and says so at the first loss that is not finite.

    Args:
        state: of the run
        found: what the graph call has found
        saved: the step of the last checkpoint, or -1
        console: where to say so

    Raises:
        RunError: ``on_nan`` is stop, and a loss is not finite.
    """
    progress = state.progress
    before, progress.noted = progress.noted, progress.noted.then(found)
    if found.steps and state.config.on_nan == "stop":
        last = f"the last checkpoint is of step {saved}" if saved >= 0 else "nothing was saved"
        raise RunError(f"the loss of step {found.first} is not finite (on_nan: stop); {last}.")
    if found.steps and before.first == NEVER:
        console.warn(
            f"the loss of step {found.first} is not finite; --detect-anomaly finds the op, layer "
            "and line that it comes from, and on_nan: stop would end training there."
        )
    if found.zeroed and not before.zeroed and progress.noted.first == NEVER:
        console.warn(
            f"by step {state.step}, update_pre has turned NaN in gradients into 0; how "
            "often is said at the end."
        )


def look_at_rate(state: State, step: int, console: Console) -> None:
    """Ends the schedule of the learning rate if a hook has assigned it, and says so."""
    schedule, progress = state.parts.rate_schedule, state.progress
    if schedule is not None and schedule.ended(progress.scheduled):
        progress.scheduled = False
        console.say(f"step {step}: a hook assigns lr, which ends lr_schedule and warmup.")


def not_finite(state: State) -> str | None:
    """Says, at the end, in how many steps losses or gradients were not finite."""
    noted, parts = state.progress.noted, []
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


@contextlib.contextmanager
def attributed(state: State, step: int) -> Iterator[None]:
    """Turns a failure of TensorFlow's inside a graph call into one line that names the hook."""
    hooks = state.hooks
    try:
        yield
    except tf.errors.OutOfRangeError as error:
        if not hooks.make_batches.is_default:
            raise hooks.make_batches.reject("returned a dataset that ends; repeat it.") from error
        if step == 0:
            said = describe_shortage(state.data.source.count_pass(), state.data.shape.batch)
            raise hooks.create_dataset.reject(said) from error
        raise RunError(
            f"{hooks.create_dataset}: the training data ended after step {step}."
        ) from error
    except tf.errors.OpError as error:
        with state.cluster.peers():
            if state.cluster.lost(error):
                raise
        if "must have the same batch size in each component" in str(error):
            failure = SetupError if step == 0 else RunError
            raise failure(f"{hooks.create_dataset}: {DIFFER}.") from error
        if anomaly := describe_anomaly(error, hooks, state.functions.operations()):
            raise RunError(f"step {step + 1}: {anomaly}.") from error
        if state.config.jit_compile and (why := not_compiled(error)):
            where = _made_by(state, unknown_to_xla(error))
            texts = "_Arg" in unknown_to_xla(error)
            out = "deterministic or jit_compile" if "determinis" in why else "jit_compile"
            cure = f"{', or' if texts else ';'} leave {out} out."
            raise SetupError(f"{where or 'jit_compile'}: {why.rstrip('.')}{cure}") from error
        raise RunError(f"{hooks.attribute_error(error)}, after step {step}.") from error


def _made_by(state: State, types: list[str]) -> str | None:
    """Returns the hook of the graph, and its line, that the first op of such a type is of."""
    for op in state.functions.operations():
        frames = frames_of(op)
        if op.type in types and (made := state.hooks.made(frames)):
            return made
    return None
