"""What the chief writes for a checkpoint: at once, or as copies in the background.

The first two checkpoints of a process are written at once; the second shows that a copy holds the
same. After them the chief copies the variables and writes the copies, while training goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.compat import holding
from ctl_core.errors import RunError, reason
from ctl_core.files import from_here
from ctl_core.numerics.staging import Background, StagingCopy, entries
from ctl_core.run_state.folder import keep_best, remove_orphans
from ctl_core.run_state.record import Record, write_record
from ctl_core.run_state.remainder import is_summed
from ctl_core.selection import best_step
from ctl_core.state import State


class CheckpointWriter:
    """Writes the user's part, the engine's part and the record, in this order.

    Attributes:
        background: what is being written while training goes on
    """

    def __init__(self, state: State, engine_part: Callable[[], tf.train.Checkpoint]) -> None:
        self.background = Background()
        self._state = state
        self._engine_part = engine_part
        self._folder = Path(state.manager.directory)
        self._save_user_part = state.manager.save
        self._summed_up: bool | None = None
        self._copying = True
        self._copies: list[StagingCopy] = []
        self._entries: list[Any] | None = None  # what copies must hold, until they have shown it

    def write(self, record: Record, hooks_ran: bool) -> None:
        """Writes a checkpoint, or begins to: what was begun before must have been waited for.

        Args:
            record: of the checkpoint
            hooks_ran: whether hooks may have changed what it is made of since the last one
        """
        copies = self._take_copies(hooks_ran)
        if not copies:
            self._write(record, self._originals())
            self._make_copies(record.step)
        elif self._entries is None:
            self.background.start(lambda: self._write(record, copies))
        elif not self._write(record, copies, expected=self._entries):
            self._write(record, self._originals())
            self._copies, self._copying = [], False
        self._entries = None if copies else self._entries

    def take_part(self) -> None:
        """Writes the user's part where nobody looks, if reading its variables takes all processes.

        Those that each replica keeps for itself are summed up over the cluster to be saved.
        """
        if self._sums_up():
            with tempfile.TemporaryDirectory() as folder:
                self._state.ckpt.write(str(Path(folder) / "part"))

    def _write(
        self,
        record: Record,
        parts: list[tf.train.Checkpoint],
        expected: list[Any] | None = None,
    ) -> bool:
        """Writes the files; the record last, unless other entries were expected."""
        user_part, engine_part = parts
        with holding(self._state.manager, user_part):
            saved = self._save_user_part(checkpoint_number=record.step)
        if saved is None:
            raise RunError("create_ckpt's manager did not save; leave out its step_counter.")
        engine_part.write(engine_path := str(self._folder / "engine" / f"ckpt-{record.step}"))
        if expected is not None and [entries(saved), entries(engine_path)] != expected:
            return False
        record = dataclasses.replace(record, path=Path(saved).name)
        write_record(self._folder / "engine", record)
        if best_step(record.best) == record.step:
            keep_best(self._folder, record)
        remove_orphans(self._folder)
        self._state.whole.append((record.step, Path(saved)))
        return True

    def _originals(self) -> list[tf.train.Checkpoint]:
        """What the copies are made of: the user's part and the engine's."""
        return [self._state.ckpt, self._engine_part()]

    def _make_copies(self, step: int) -> None:
        """Makes what later checkpoints are copied to, if a copy may hold the same."""
        ckpt, manager = self._state.ckpt, self._state.manager
        usual = (tf.train.Checkpoint, tf.train.CheckpointManager)
        if self._copying and (type(ckpt), type(manager)) == usual and not self._sums_up():
            self._copies = [StagingCopy(part) for part in self._originals()]
            paths = manager.latest_checkpoint, str(self._folder / "engine" / f"ckpt-{step}")
            self._entries = [entries(path) for path in paths]

    def _take_copies(self, hooks_ran: bool) -> list[tf.train.Checkpoint]:
        """Copies the variables; returns what is to be written instead of the originals, if any."""
        if hooks_ran and not all(one.fits() for one in self._copies):
            self._copies = []
        for one in self._copies:
            one.take()
        copies = [one.checkpoint for one in self._copies]
        if copies:
            copies[0].save_counter.assign(self._state.ckpt.save_counter)
            self._state.ckpt.save_counter.assign_add(1)
        return copies

    def _sums_up(self) -> bool:
        """Whether reading what the user's part holds takes all processes of a cluster."""
        if self._state.cluster.task.processes == 1:
            return False
        if self._summed_up is None:
            found = tf.train.TrackableView(self._state.ckpt).descendants()
            self._summed_up = any(is_summed(item) for item in found)
        return self._summed_up


@contextlib.contextmanager
def all_write(state: State, step: int | None) -> Iterator[None]:
    """Around one part of the writing: all processes go on when all are done, or none does.

    Raises:
        RunError: a file cannot be written, here or by another process.
    """
    failure: Exception | None = None
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        if isinstance(error, tf.errors.OpError) and state.cluster.lost(error):
            raise
        failure = error
    well = state.cluster.all(failure is None)
    if failure is not None:
        raise unwritten(state, step, failure) from failure
    if not well:
        raise unwritten(state, step, None)


def unwritten(state: State, step: int | None, failure: Exception | None) -> RunError:
    """Returns the error for a checkpoint that cannot be written; None: by another process."""
    why = " by another process" if failure is None else f": {reason(failure)}"
    return RunError(
        f"the checkpoint of step {step} cannot be written to {from_here(state.manager.directory)}"
        f"{why}; earlier checkpoints are kept."
    )
