"""``evaluate --watch``: evaluates the checkpoints of a run that another process trains.

The run is only read, but for two places that training never touches: watch.jsonl, with lines like
those of metrics.jsonl, and tb/watch.
"""

from __future__ import annotations

import contextlib
import math
import time

from ctl_core.checkpoint.checkpoints import Checkpoints
from ctl_core.checkpoint.folder import Run
from ctl_core.checkpoint.record import Damaged, Source, read_record, saved_steps
from ctl_core.evaluation.summaries import Summaries
from ctl_core.hooks.recording import read_flags
from ctl_core.model.state import State
from ctl_core.run.console import Console, format_values
from ctl_core.run.errors import SetupError
from ctl_core.run.files import from_here, is_locked
from ctl_core.run.listeners import Listeners, MetricsFile, read_metrics
from ctl_core.run.sources import read_file

FILE = "watch.jsonl"
# How often the run is looked at (seconds).
POLL = 1.0
# How long nobody may train a run that is not at its end, before it counts as ended (seconds): one
# that was killed is started again meanwhile.
GRACE = 30.0


def watch(state: State, run: Run, console: Console) -> dict[str, float]:
    """Evaluates each checkpoint as it comes, in the order of their steps, until the run has ended.

    Those that are there already come first, but for those that an earlier watch has evaluated. A
    checkpoint that is deleted before its turn is left out.

    Args:
        state: with an evaluation, on one device
        run: whose checkpoints are evaluated
        console: where the values are shown

    Returns:
        The values of the last checkpoint, or {} if none was new.

    Raises:
        SetupError: the run has ended and has no checkpoint; or one is damaged, or does not fit.
    """
    folder, file = run.ckpt, run.path / FILE
    console.say(f"{run.shown}: watching; the values go to {from_here(file)}.")
    checkpoints = Checkpoints(state, console)
    seen = {line["step"] for line in read_metrics(file)}
    summaries, values = Summaries(run.path / "tb"), dict[str, float]()
    listeners = Listeners([MetricsFile(FILE), summaries])
    listeners.start(run.path, {}, max(seen, default=0))
    number, left_at = 0, math.inf
    with contextlib.closing(summaries):
        while True:
            # Before looking: what is there when nobody trains is all.
            held = is_locked(run.path / "train.log")
            if new := set(saved_steps(folder)) - seen:
                seen.add(step := min(new))
                try:
                    source = Source("checkpoint", run.path, step)
                    values = _evaluate(state, checkpoints, source)
                except SetupError:
                    if step in saved_steps(folder):
                        raise
                    continue  # deleted while it was read
                console.say(f"step {step}  eval: {format_values(values)}")
                listeners.tell("values", step, "watch", values)
                number += 1
                continue
            if held:
                left_at = math.inf
            elif _is_at_end(run, state) or time.monotonic() - left_at > GRACE:
                break
            elif left_at == math.inf:
                console.say(f"{run.shown}: not trained now; waiting {GRACE:g} s for more.")
                left_at = time.monotonic()
            time.sleep(POLL)
    Source("checkpoint", run.path).find_steps()
    console.say(f"{run.shown}: has ended; evaluated {number} checkpoint{'s' * (number != 1)}.")
    return values


def _evaluate(state: State, checkpoints: Checkpoints, source: Source) -> dict[str, float]:
    """Evaluates a checkpoint.

    Raises:
        SetupError: it has gone, is damaged or does not fit.
    """
    frozen = read_flags(state.recording)
    checkpoints.restore(source, with_input=False)
    # What is frozen is not regularized, so that the graph is another.
    if read_flags(state.recording) != frozen:
        state.evaluation.trace()
    return state.evaluation.evaluate()  # type: ignore[no-any-return]


def _is_at_end(run: Run, state: State) -> bool:
    """Whether the newest checkpoint is the one with which training ends."""
    try:
        newest = read_record(run.ckpt, next(iter(saved_steps(run.ckpt)), -1))
    except Damaged:  # or there is none
        return False
    if newest.progress.get("ended") is not None:
        return True
    own = read_file(run.config_file)  # each start of the training writes it
    last, epochs = (own.values.get(name) for name in ("steps", "epochs"))
    if epochs is not None and state.data.steps_per_epoch is not None:
        last = int(epochs) * state.data.steps_per_epoch
    return last is not None and newest.step >= int(last)
