"""What a run says of itself: where it begins, what its losses are, how it ends."""

from __future__ import annotations

import signal
from pathlib import Path

from ctl_core.state import State


def opening(state: State, start: int, last: int, resumed: bool) -> str:
    """Says where training begins, how far it goes, and on what."""
    config, replicas = state.config, state.context.replicas
    batch = f"batch size {config.batch_size}"
    if config.accumulate_steps > 1:
        batch += f" in {config.accumulate_steps} micro-batches"
    kinds = {d.split("device:")[-1].split(":")[0] for d in state.strategy.extended.worker_devices}
    where = f"{replicas} replica{'s' * (replicas > 1)} on {', '.join(sorted(kinds))}"
    if state.computed_in:
        where += f", in {' and '.join(state.computed_in)}"
    if state.ended:
        return (
            f"{state.run_dir}: ended early, at step {start} of {last}; nothing left to train; "
            "more steps, or --continue, let it go on."
        )
    if start >= last:
        return f"{state.run_dir}: at step {start} of {last} already, nothing left to train."
    doing = f"resuming at step {start}" if resumed else "training"
    return f"{state.run_dir}: {doing}, to step {last}, {batch}, {where}."


def closing(state: State, start: int, seconds: float) -> str:
    """Says how training has ended, after how many steps and with what evaluation."""
    values = "  ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
    parts = [f"step {state.step}", f"{state.step - start} steps in {seconds:.1f} s"]
    if values:
        parts.append(f"evaluation: {values}")
    if state.stopped_by is not None:
        name = signal.Signals(state.stopped_by).name
        again = f"--run-name {Path(state.run_dir).name}"
        head = f"stopped by {name}, saved; goes on from here with {again}"
    else:
        head = "ended early" if state.ended else "done"
    return f"{head}: {'; '.join(parts)}. Everything is in {Path(state.run_dir).resolve()}"


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
