"""What a run says of itself: where it begins, how far it goes, how it ends."""

from __future__ import annotations

import signal
from pathlib import Path

from ctl_core.model.state import State
from ctl_core.numerics.not_finite import NEVER, Noted
from ctl_core.numerics.variables import trainable_variables
from ctl_core.run.console import Console, format_evaluation
from ctl_core.run.errors import RunError
from ctl_core.run.files import from_here


def describe_start(state: State, start: int, last: int) -> str:
    """Says where training begins, how far it goes, and on what."""
    config, replicas, run = state.config, state.parts.shape.replicas, from_here(state.run_dir)
    if state.ended or start >= last:
        early, go_on = "ended early, " * state.ended, ", or --continue," * state.ended
        done = f"{early}at step {start} of {last}, nothing left to train"
        return f"{run}: {done}; more steps{go_on} let it go on."
    doing = f"resuming at step {start}" if start else "training"
    batch = f"batch size {config.batch_size}"
    if config.accumulate_steps > 1:
        batch += f" in {config.accumulate_steps} micro-batches"
    kinds = {d.split("device:")[-1].split(":")[0] for d in state.strategy.extended.worker_devices}
    where = f"{replicas} replica{'s' * (replicas > 1)} on {', '.join(sorted(kinds))}"
    if state.computed_in:
        where += f", in {' and '.join(state.computed_in)}"
    return f"{run}: {doing}, to step {last}, {batch}, {where}."


def count_parameters(state: State) -> str:
    """Returns ``97 parameters to train``, of the model and of the loss; frozen ones are none."""
    both = *trainable_variables(state.train_model), *trainable_variables(state.train_loss)
    sizes = {id(variable): variable.shape.num_elements() for variable in both}
    return f"{sum(sizes.values()):,} parameters to train"


def describe_end(state: State, start: int) -> str:
    """Says how training has ended, how long it took, and what the last evaluation found."""
    clock = state.clock
    if state.stopped_by is not None:
        name = signal.Signals(state.stopped_by).name
        again = f"--run-name {Path(state.run_dir).name}"
        head = f"stopped by {name}, saved; goes on from here with {again}"
    else:
        head = "ended early" if state.ended else "done"
    took = f"{state.step - start} steps in {clock.elapsed():.1f} s"
    if (rest := clock.elapsed() - clock.training()) > 0.1:
        took += f", {rest:.1f} s of them evaluations and checkpoints"
    parts = [f"step {state.step}", took]
    if state.metrics:
        parts.append(format_evaluation(state.metrics, state.progress.evaluated, state.step))
    return f"{head}: {'; '.join(parts)}. Everything is in {from_here(state.run_dir)}"


def warn_of_noted(state: State, console: Console) -> None:
    """Says in which steps a number was not finite."""
    noted = state.progress.noted
    if noted.steps:
        at_least = "at least " * (state.cluster.task.processes > 1)
        console.warn(
            f"the loss was not finite in {at_least}{noted.steps} of {state.step} steps, from "
            f"{noted.first} to {noted.latest}{', the last one' * state.diverged}."
        )
    if noted.zeroed:
        console.warn(
            f"update_pre turned NaN in gradients into 0 in {noted.zeroed} of {state.step} steps."
        )


def note_losses(state: State, found: Noted, console: Console) -> None:
    """Notes what a graph call has found, and says so at the first loss that is not finite.

    Raises:
        RunError: ``on_nan`` is stop, and a loss is not finite.
    """
    progress = state.progress
    before, progress.noted = progress.noted, progress.noted.then(found)
    if found.steps and state.config.on_nan == "stop":
        raise RunError(f"the loss of step {found.first} is not finite (on_nan: stop).")
    if found.steps and before.first == NEVER:
        console.warn(
            f"the loss of step {found.first} is not finite; --detect-anomaly finds the op, layer "
            "and line that it comes from, and on_nan: stop would end training there."
        )
