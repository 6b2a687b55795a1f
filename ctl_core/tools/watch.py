"""``evaluate --watch``: evaluates the checkpoints of a run that another process trains.

The run is only read, but for two places that training never touches: watch.jsonl, with lines like
those of metrics.jsonl, and tb/watch.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.checkpoint import Checkpoints
from ctl_core.console import Console
from ctl_core.errors import CtlError, SetupError, reason
from ctl_core.evaluate import evaluate, trace_anew
from ctl_core.files import from_here, refuse_links, written_whole
from ctl_core.layers import read_file
from ctl_core.metric_values import read_metrics, storable, worded
from ctl_core.run_folder import Run
from ctl_core.run_state.record import Damaged, read_record, saved_steps
from ctl_core.state import State

FILE = "watch.jsonl"
# How often the run is looked at (seconds).
POLL = 1.0
# How long nobody may train a run that is not at its end, before it counts as ended (seconds): one
# that was killed is started again meanwhile.
GRACE = 30.0
# How often a checkpoint that cannot be read is tried: it may be about to be deleted.
TRIES = 3


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
        SetupError: the run has ended and has no checkpoint; or one does not fit the model.
        SystemExit: a SIGINT or a SIGTERM has come.
    """
    return _Watch(state, run, console).follow()


class _Watch:
    """One run that is watched."""

    def __init__(self, state: State, run: Run, console: Console) -> None:
        self._state, self._run, self._console = state, run, console
        self._checkpoints = Checkpoints(state, console)
        self._values = _Values(run.path, console)
        self._engine = run.ckpt / "engine"
        # Records by the time at which they were written: one that is written again is new.
        self._seen = self._values.evaluated(self._stamps())
        self._tries: dict[tuple[int, int], int] = {}
        self._frozen: list[bool] | None = None

    def follow(self) -> dict[str, float]:
        console, run = self._console, self._run
        console.say(f"{run.shown}: watching; the values go to {from_here(run.path / FILE)}.")
        values: dict[str, float] = {}
        number, left_at, was_held = 0, None, False
        with _ended_by_signals(console):
            while True:
                held = run.is_held()  # before looking: what is there when nobody trains is all
                was_held = was_held or held is not False
                if (step := self._next()) is not None:
                    if found := self._evaluate(step):
                        values, number = found, number + 1
                    else:
                        time.sleep(POLL)
                    continue
                if held is not False:
                    left_at = None
                elif self._at_end() or not (was_held or saved_steps(self._engine)):
                    break
                elif left_at is None:
                    console.say(f"{run.shown}: not trained now; waiting {GRACE:g} s for more.")
                    left_at = time.monotonic()
                elif time.monotonic() - left_at > GRACE:
                    break
                time.sleep(POLL)
        if not saved_steps(self._engine):
            raise SetupError(
                f"{from_here(run.ckpt)}: no checkpoint there yet; train the run first."
            )
        console.say(f"{run.shown}: has ended; evaluated {number} checkpoint{'s' * (number != 1)}.")
        return values

    def _stamps(self) -> dict[int, int]:
        """Returns the checkpoints there are, by step, each with the time of its record."""
        found = {}
        for step in reversed(saved_steps(self._engine)):
            with contextlib.suppress(OSError):  # deleted meanwhile
                found[step] = (self._engine / f"ckpt-{step}.json").stat().st_mtime_ns
        return found

    def _next(self) -> int | None:
        """Returns the lowest step of a checkpoint that was not evaluated, if there is one."""
        new = (step for step, stamp in self._stamps().items() if self._seen.get(step) != stamp)
        return next(new, None)

    def _evaluate(self, step: int) -> dict[str, float] | None:
        """Evaluates a checkpoint; None if it cannot be read."""
        stamp, state = self._stamps().get(step), self._state
        if stamp is None:
            return None
        try:
            record = self._checkpoints.reader.read(self._run.ckpt, step)
        except (Damaged, CtlError) as error:
            if self._stamps().get(step) != stamp:  # deleted, or written again, while it was read
                return None
            if isinstance(error, CtlError):
                raise
            tries = self._tries[step, stamp] = self._tries.get((step, stamp), 0) + 1
            if tries == TRIES:
                self._console.warn(f"the checkpoint of step {step} is damaged ({error}); left out.")
                self._seen[step] = stamp
            return None
        state.freezing.put_back(record.frozen)
        if state.context.average and record.holds("ema"):
            state.context.average.put_in()
        assert state.evaluation is not None
        flags = state.freezing.flags()
        if self._frozen not in (None, flags):  # what is frozen is not regularized
            trace_anew(state.evaluation, state.context, state.strategy, state.cluster.task)
        self._frozen = flags
        values = evaluate(state.evaluation)
        assert values is not None
        self._console.say(f"step {step}  eval: {worded(values)}")
        self._values.write(step, values)
        self._seen[step] = stamp
        return values

    def _at_end(self) -> bool:
        """Whether the newest checkpoint is the one with which training ends."""
        try:
            newest = read_record(self._engine, next(iter(saved_steps(self._engine)), -1))
        except Damaged:  # or there is none
            return False
        if newest.ended is not None:
            return True
        own = read_file(self._run.config_file)  # each start of the training writes it
        last, epochs = (own.get(name, ("", None))[1] for name in ("steps", "epochs"))
        per_epoch = self._state.data.steps_per_epoch
        if epochs is not None and per_epoch is not None:
            last = int(epochs) * per_epoch
        return last is not None and newest.step >= int(last)


class _Values:
    """The values by step: watch.jsonl, in which each step stands once, and tb/watch."""

    def __init__(self, folder: Path, console: Console) -> None:
        """Refuses links that lead out of the run's folder."""
        self._folder, self._file, self._console = folder, folder / FILE, console
        refuse_links(folder, [self._file, folder / "tb"])
        self._writer: Any = None

    def evaluated(self, stamps: dict[int, int]) -> dict[int, int]:
        """Returns those checkpoints that the file has values of, written after they were."""
        steps = {line["step"] for line in read_metrics(self._folder, FILE)}
        if not steps:
            return {}
        written = self._file.stat().st_mtime_ns
        return {step: at for step, at in stamps.items() if step in steps and at <= written}

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the values of a step; where that cannot be, says so once."""
        others = [line for line in read_metrics(self._folder, FILE) if line["step"] != step]
        lines = [*others, {"step": step, "split": "watch", **storable(values)}]
        lines.sort(key=lambda line: line["step"])
        try:
            with written_whole(self._file) as beside:
                beside.write_text("".join(json.dumps(line) + "\n" for line in lines))
            self._writer = self._writer or tf.summary.create_file_writer(
                str(self._folder / "tb" / "watch")
            )
            with self._writer.as_default(step=step):
                for name, value in values.items():
                    tf.summary.scalar(name, value)
            self._writer.flush()
        except (OSError, tf.errors.OpError) as error:
            self._console.warn_once(
                f"{from_here(self._file)} cannot be written: {reason(error)}; the values are only "
                "shown here."
            )


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
