"""Decides when checkpoints are copied to the mirror; a thread copies them with mirror.py.

If copying fails, training continues, and the console reports how many checkpoints were not copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctl_core.checkpoint.mirror import STAGING, Mirror
from ctl_core.checkpoint.record import (
    Damaged,
    copy_checkpoint,
    find_best_step,
    find_newest_usable,
    list_files,
    list_saved_steps,
    read_record,
)
from ctl_core.cluster.signals import Terminated, postpone_end
from ctl_core.cluster.task import Task
from ctl_core.run.console import Console
from ctl_core.run.errors import format_error
from ctl_core.run.files import remove
from ctl_core.run.listeners import Listener, Listeners
from ctl_core.run.settings import Config

# A run may have to wait for the mirror at its end. The console reports the wait after PATIENCE, and
# the progress of the copy every INTERVAL (seconds).
PATIENCE = 1.0
INTERVAL = 10.0


@dataclasses.dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint that waits to be copied.

    Attributes:
        step: the step of the checkpoint
        best: the step of the best checkpoint, or -1
        folder: a folder with links to the files of both checkpoints. The files remain there if the
            run deletes the checkpoints.
        is_new: whether the checkpoint was just saved; if False, the mirror may already have it
    """

    step: int
    best: int
    folder: Path
    is_new: bool

    def measure(self) -> int:
        """Returns the size of the checkpoint in bytes."""
        return sum(path.stat().st_size for path in list_files(self.folder / "newest", self.step))


class Copier(Listener):
    """Copies checkpoints to the mirror, one at a time.

    If checkpoints are saved faster than they can be copied, the newest checkpoint replaces the one
    that waits to be copied.
    """

    def __init__(self, mirror: Mirror, run: Path, console: Console) -> None:
        self._mirror = mirror
        self._run = run
        self._console = console
        self._condition = threading.Condition()  # guards the next three attributes
        self._waiting: StagedCheckpoint | None = None
        self._current: StagedCheckpoint | None = None
        self._is_closing = False
        self._last_step = -1
        self._missing = 0
        self._causes: set[str] = set()
        # The thread is a daemon, so that the process can end if Ctrl-C interrupts the wait.
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        remove(run / STAGING)
        self._thread.start()

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        """Copies the checkpoint that a run resumes from, if the mirror lacks it."""
        self._copy_last()

    def saved(self, step: int, path: Path) -> None:
        """Copies a checkpoint that has just been completed."""
        self._stage(step, is_new=True)

    def finish(self) -> None:
        """Waits until the mirror has the last checkpoint; Ctrl-C ends the wait."""
        self._copy_last()
        try:
            with postpone_end(self._console.say, f"step {self._last_step} is copied"):
                self._wait()
        except KeyboardInterrupt:
            self._console.warn(
                f"mirror: the copy to {self._mirror.shown} was interrupted; the earlier "
                "checkpoints there are complete."
            )
        if not self._thread.is_alive():
            remove(self._run / STAGING)
        if self._missing:
            self._console.warn(
                f"mirror: checkpoints that could not be copied to {self._mirror.shown}: "
                f"{self._missing}."
            )

    def _copy_last(self) -> None:
        """Copies the run's newest checkpoint, if it was not staged yet and the mirror lacks it."""
        step = find_newest_usable(self._run / "ckpt")
        if step > self._last_step:
            self._stage(step, is_new=False)

    def _wait(self) -> None:
        """Waits until all staged checkpoints are copied; prints the progress."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._console.say(
                f"mirror: waiting until step {self._last_step} is copied to "
                f"{self._mirror.shown}; press Ctrl-C to stop waiting."
            )
        last_line = time.monotonic()
        copied_before = self._mirror.copied_bytes
        while self._thread.is_alive():
            self._thread.join(0.2)
            if time.monotonic() - last_line > INTERVAL:
                last_line = time.monotonic()
                copied = self._mirror.copied_bytes - copied_before
                self._console.say(f"mirror: {copied / 1e6:.1f} of {self._measure():.1f} MB")

    def _measure(self) -> float:
        """Returns the size of the checkpoints that are not completely copied yet (MB)."""
        with self._condition:
            staged = [self._current, self._waiting]
        with contextlib.suppress(OSError):  # a checkpoint may have been removed in the meantime
            return sum(checkpoint.measure() for checkpoint in staged if checkpoint) / 1e6
        return 0.0

    def _stage(self, step: int, is_new: bool) -> None:
        """Links the files of a checkpoint, and queues it for the thread to copy.

        A checkpoint with weights that are not finite is left out. In the mirror, it would soon
        replace all usable checkpoints.
        """
        ckpt = self._run / "ckpt"
        folder = self._run / STAGING / str(step)
        try:
            record = read_record(ckpt, step)
            if record.is_finite is False:
                return
            self._last_step = step
            remove(folder)
            copy_checkpoint(ckpt, step, folder / "newest")
            best = find_best_step(record.progress["best"])
            if best not in (-1, step) and best in list_saved_steps(ckpt / "best"):
                copy_checkpoint(ckpt / "best", best, folder / "best")
        except (OSError, Damaged) as error:
            self._last_step = step
            self._note_failure(step, error)
            return
        with self._condition:
            replaced = self._waiting
            self._waiting = StagedCheckpoint(step, best, folder, is_new)
            self._condition.notify()
        if replaced is not None:
            remove(replaced.folder)

    def _work(self) -> None:
        """Copies staged checkpoints until the run has ended and no checkpoint is waiting."""
        while True:
            with self._condition:
                while self._waiting is None and not self._is_closing:
                    self._condition.wait()
                self._current = self._waiting
                self._waiting = None
            if self._current is None:
                return
            self._copy(self._current)

    def _copy(self, staged: StagedCheckpoint) -> None:
        """Copies a checkpoint; a failure is reported and does not end training."""
        try:
            if staged.is_new or staged.step not in self._mirror.list_steps():
                self._mirror.copy(staged.folder, staged.step, staged.best)
        except Exception as error:
            self._note_failure(staged.step, error)
        finally:
            with contextlib.suppress(OSError):
                remove(staged.folder)

    def _note_failure(self, step: int, error: Exception) -> None:
        """Counts a checkpoint that could not be copied; prints each cause only once."""
        self._missing += 1
        cause = format_error(error)
        # Errors count as the same cause if the beginnings of their messages are equal. The rest of
        # a message may contain a file name, which differs each time.
        kind = f"{type(error).__name__} {getattr(error, 'errno', None) or cause[:40]}"
        if kind in self._causes:
            return
        self._causes.add(kind)
        self._console.warn(
            f"mirror: the checkpoint of step {step} could not be copied to "
            f"{self._mirror.shown} ({cause}); training continues. Not copied so far: "
            f"{self._missing}."
        )


@contextlib.contextmanager
def copy_to_mirror(
    config: Config, task: Task, run: Path, listeners: Listeners, console: Console
) -> Iterator[None]:
    """Copies the checkpoints of a run to its mirror, on the chief; does nothing without a mirror.

    When training has ended or failed, the context waits for the last copy, even after SIGTERM. It
    does not wait if training was interrupted by Ctrl-C.

    Args:
        config: the settings
        task: this process in its cluster
        run: the folder of the run
        listeners: the listeners of the run, to which the copier is added
        console: prints the progress and the failures of copying
    """
    if config.mirror is None or not task.chief:
        yield
        return
    copier = Copier(Mirror(config), run, console)
    listeners.candidates.append(copier)
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Terminated):
            copier.finish()
        raise
    except BaseException:
        copier.finish()
        raise
    copier.finish()
