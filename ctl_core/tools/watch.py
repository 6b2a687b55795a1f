"""``evaluate --watch``: evaluates the checkpoints of a run that another process trains.

The run is only read, but for two places that training never touches: watch.jsonl, with lines like
those of metrics.jsonl, and tb/watch.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctl_core.checkpoint import Checkpoints
from ctl_core.console import Console, format_values
from ctl_core.errors import SetupError
from ctl_core.files import from_here, refuse_links
from ctl_core.layers import read_file
from ctl_core.model.freezing import read_flags
from ctl_core.run.folder import Run
from ctl_core.run.listeners import Listeners
from ctl_core.run.metrics import MetricsFile, read_metrics
from ctl_core.run.summaries import Summaries
from ctl_core.run_state.record import Damaged, read_record, saved_steps
from ctl_core.serving.restore import missing_checkpoint, restore_weights
from ctl_core.state import State

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
        SystemExit: a SIGINT or a SIGTERM has come.
    """
    engine, file = run.ckpt / "engine", run.path / FILE
    refuse_links(run.path, [file, run.path / "tb"])
    console.say(f"{run.shown}: watching; the values go to {from_here(file)}.")
    checkpoints = Checkpoints(state, console)
    seen = _find_evaluated(file, _read_stamps(engine))
    summaries, values = Summaries(run.path / "tb"), dict[str, float]()
    listeners = Listeners([MetricsFile(file), summaries])
    listeners.start(run.path, {}, max(seen, default=0))
    number, left_at = 0, math.inf
    with contextlib.closing(summaries), _ended_by_signals(console):
        while True:
            held = run.is_held()  # before looking: what is there when nobody trains is all
            stamps = _read_stamps(engine)
            new = (step for step, stamp in stamps.items() if seen.get(step) != stamp)
            if (step := next(new, None)) is not None:
                seen[step] = stamps[step]
                try:
                    values = _evaluate(state, checkpoints, step)
                except SetupError:
                    if _read_stamps(engine).get(step) == stamps[step]:
                        raise
                    continue  # deleted, or written again, while it was read
                console.say(f"step {step}  eval: {format_values(values)}")
                listeners.tell("values", step, "watch", values)
                number += 1
                continue
            if held is not False:
                left_at = math.inf
            elif _is_at_end(run, state, engine) or time.monotonic() - left_at > GRACE:
                break
            elif left_at == math.inf:
                console.say(f"{run.shown}: not trained now; waiting {GRACE:g} s for more.")
                left_at = time.monotonic()
            time.sleep(POLL)
    if not saved_steps(engine):
        raise missing_checkpoint(run)
    console.say(f"{run.shown}: has ended; evaluated {number} checkpoint{'s' * (number != 1)}.")
    return values


def _read_stamps(engine: Path) -> dict[int, int]:
    """Returns the checkpoints by step, each with the time of its record: anew, if written again."""
    found = {}
    for step in reversed(saved_steps(engine)):
        with contextlib.suppress(OSError):  # deleted meanwhile
            found[step] = (engine / f"ckpt-{step}.json").stat().st_mtime_ns
    return found


def _find_evaluated(file: Path, stamps: dict[int, int]) -> dict[int, int]:
    """Returns those checkpoints that the file has values of, written after they were."""
    steps = {line["step"] for line in read_metrics(file)}
    written = file.stat().st_mtime_ns if steps else 0
    return {step: at for step, at in stamps.items() if step in steps and at <= written}


def _evaluate(state: State, checkpoints: Checkpoints, step: int) -> dict[str, float]:
    """Evaluates a checkpoint.

    Raises:
        SetupError: it has gone, is damaged or does not fit.
    """
    frozen = read_flags(state.recording)
    restore_weights(checkpoints, state, step)
    sets = list(state.evaluation.sets.values())
    # What is frozen is not regularized, so that the graph is another.
    if sets[0].run_steps is None or read_flags(state.recording) != frozen:
        state.evaluation.trace(state.recording)
    return state.evaluation.evaluate()  # type: ignore[no-any-return]


def _is_at_end(run: Run, state: State, engine: Path) -> bool:
    """Whether the newest checkpoint is the one with which training ends."""
    try:
        newest = read_record(engine, next(iter(saved_steps(engine)), -1))
    except Damaged:  # or there is none
        return False
    if newest.progress.get("ended") is not None:
        return True
    own = read_file(run.config_file)  # each start of the training writes it
    last, epochs = (own.values.get(name) for name in ("steps", "epochs"))
    if epochs is not None and state.data.source.steps_per_epoch is not None:
        last = int(epochs) * state.data.source.steps_per_epoch
    return last is not None and newest.step >= int(last)


@contextlib.contextmanager
def _ended_by_signals(console: Console) -> Iterator[None]:
    """Ends what is within at a SIGINT or a SIGTERM, with the exit code of a stop."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if main else None
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as asked:
        number = signal.SIGINT if isinstance(asked, KeyboardInterrupt) else signal.SIGTERM
        console.say(f"stopped by {number.name}.")
        raise SystemExit(128 + number) from None
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
