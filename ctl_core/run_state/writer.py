"""Writes a checkpoint in the background, from copies of all variables, while training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from ctl_core.compat import holding
from ctl_core.errors import RunError, reason
from ctl_core.files import from_here
from ctl_core.numerics.staging import Background, StagingCopy
from ctl_core.run_state.record import Record, keep_best, remove_orphans, write_record
from ctl_core.state import State


class Writer:
    """Writes the user's part, the engine's part and the record, in this order.

    Attributes:
        background: where it does so
    """

    def __init__(self, state: State, engine_part: tf.train.Checkpoint) -> None:
        self.background = Background()
        self._state = state
        self._parts = [state.ckpt, engine_part]
        self._copies: list[StagingCopy] = []

    def write(self, record: Record) -> None:
        """Begins to write a checkpoint; what was begun before must have been waited for.

        Every process of a cluster must call it, since variables that each replica keeps for itself
        are summed up to be copied; the chief writes. The first checkpoint is written at once, so
        that there is one; so is what has no copy since it is no variable, such as a table.
        """
        if new := not self._copies or not all(copy.fits() for copy in self._copies):
            self._copies = [StagingCopy(part) for part in self._parts]
        for copy in self._copies:
            copy.take()
        if not self._state.cluster.task.chief:
            return
        counter = self._parts[0].save_counter
        self._copies[0].checkpoint.save_counter.assign(counter)
        counter.assign_add(1)
        if new or not all(copy.is_whole for copy in self._copies):
            self._write(record)
        else:
            self.background.start(lambda: self._write(record))

    def _write(self, record: Record) -> None:
        user_part, engine_part = (copy.checkpoint for copy in self._copies)
        manager = self._state.manager
        folder = Path(manager.directory)
        with holding(manager, user_part):
            saved = manager.save(checkpoint_number=record.step)
        if saved is None:
            raise RunError("create_ckpt's manager did not save; leave out its step_counter.")
        engine_part.write(str(folder / "engine" / f"ckpt-{record.step}"))
        write_record(folder, record)
        keep_best(folder, record)
        remove_orphans(folder)
        self._state.whole.append((record.step, Path(saved)))


@contextlib.contextmanager
def all_write(state: State, step: int) -> Iterator[None]:
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
    if not state.cluster.all(failure is None):
        why = " by another process" if failure is None else f": {reason(failure)}"
        raise RunError(
            f"the checkpoint of step {step} cannot be written to "
            f"{from_here(state.manager.directory)}{why}; earlier checkpoints are kept."
        ) from failure
