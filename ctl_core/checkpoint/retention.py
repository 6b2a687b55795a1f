"""Which checkpoints of a run are kept: the newest, the best, and those that the manager keeps.

The manager of ``create_ckpt`` decides which user's parts are deleted. The engine follows it after
each checkpoint, in ``keep_and_remove``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ctl_core.checkpoint.record import Record, list_files, list_names, list_saved_steps
from ctl_core.model.state import State
from ctl_core.run.files import atomic_write


def keep_and_remove(state: State, record: Record) -> None:
    """Keeps a copy of the best checkpoint, and removes what the manager no longer keeps.

    Called on the chief after each checkpoint, in the thread that has written it.

    Args:
        state: of the run, with its settings and manager
        record: of the checkpoint that has just been written
    """
    folder = Path(state.manager.directory)
    keep_best(folder, record)
    remove_orphans(folder)


def remove_orphans(folder: Path) -> None:
    """Removes the engine's files of checkpoints whose user's part the manager has deleted.

    A user's part under another prefix, which the manager does not delete, keeps a checkpoint.
    The record is removed first, so that a checkpoint that is half removed does not count.
    """
    prefixes = [Path(name).stem for name in list_names(folder) if name.endswith(".index")]
    kept = {prefix.rpartition("-")[2] for prefix in prefixes}
    for step in list_saved_steps(folder):
        if str(step) in kept:
            continue
        for path in reversed(list_files(folder, step)):
            path.unlink(missing_ok=True)


def find_best_step(best: dict[str, list[float]]) -> int:
    """Returns the step of the checkpoint that ``keep_best`` keeps, or -1.

    Args:
        best: by criterion the best value, its step, and the evaluations since; see ``Criterion``
    """
    steps = [int(step) for key, (_, step, _) in best.items() if key.startswith("keep_best=")]
    return max(steps, default=-1)


def keep_best(folder: Path, record: Record, source: Path | None = None) -> None:
    """Copies the best checkpoint to the folder ``best``, unless it is there already.

    Args:
        folder: the run's folder of checkpoints
        record: of the newest checkpoint, which knows the best step
        source: the folder of checkpoints that a run was forked from, if that has the newest one
    """
    step = find_best_step(record.progress["best"])
    best = folder / "best"
    if step < 0:
        return
    source = source or folder
    for place in (source, source / "best"):
        if step in list_saved_steps(place) and step not in list_saved_steps(best):
            with atomic_write(best) as temporary:
                copy_checkpoint(place, step, temporary)


def copy_checkpoint(folder: Path, step: int, target: Path) -> None:
    """Copies a checkpoint; the copy shares its files where the file system supports that.

    Args:
        folder: with the checkpoint
        step: of the checkpoint
        target: the folder of the copy, which is created
    """
    (target / "engine").mkdir(parents=True)
    for path in list_files(folder, step):
        copy = target / path.relative_to(folder)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copy2(path, copy)
