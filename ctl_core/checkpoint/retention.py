"""Removes old checkpoints, and keeps a copy of the best one.

The manager of ``create_ckpt`` deletes the user's part of the oldest checkpoints, in the run's
checkpoint folder but not in its subfolders. ``keep_and_remove`` then removes the engine's files of
these checkpoints.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import tensorflow as tf

from ctl_core.checkpoint.record import (
    Record,
    copy_checkpoint,
    find_best_step,
    is_whole,
    list_engine_steps,
    list_files,
    list_names,
    list_saved_steps,
)
from ctl_core.model.state import State
from ctl_core.run.errors import SetupError, format_name
from ctl_core.run.files import atomic_write, relative_path, remove

# The names of temporary files of TensorFlow and of ``atomic_write`` in a checkpoint folder.
_TEMPORARY = re.compile(
    r".+-\d+_temp|.+\.tempstate\d+|checkpoint\.tmp\w+|best\.tmp|ckpt-\d+\.json\.tmp"
)


def keep_and_remove(state: State, record: Record, source: Path | None = None) -> None:
    """Keeps a copy of the best checkpoint, and removes checkpoints that the manager has deleted.

    The chief calls this after each checkpoint, in the thread that has written it. It is also called
    when a run starts from a checkpoint, since the process that wrote the checkpoint may have been
    killed before the call.

    Args:
        state: the state of the run
        record: the record of the newest checkpoint
        source: the folder with that checkpoint; by default, the checkpoint folder of the run
    """
    folder = Path(state.manager.directory)
    keep_best(folder, record, source or folder)
    remove_orphans(folder)


def remove_orphans(folder: Path) -> None:
    """Removes the engine's files of checkpoints whose user's part the manager has deleted.

    A checkpoint is kept as long as its user's part exists. The user's part may have any prefix,
    even one that the manager does not know and never deletes. The record is removed first, so that
    a partly removed checkpoint is ignored. If a kill interrupts the removal, the remaining files
    are removed the next time.
    """
    names = [name for name in list_names(folder) if name.endswith(".index")]
    kept = {name.removesuffix(".index").rpartition("-")[2] for name in names}
    for step in list_engine_steps(folder):
        if str(step) in kept:
            continue
        for path in reversed(list_files(folder, step)):
            path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Removes temporary files and a damaged copy that a killed process may have left.

    A damaged copy of the best checkpoint is removed only if the folder still contains the complete
    original, from which ``keep_best`` copies it again.

    Args:
        folder: the run's checkpoint folder, to which no process is writing
    """
    for parent in (folder, folder / "engine"):
        for name in list_names(parent):
            if _TEMPORARY.fullmatch(name):
                remove(parent / name)
    best = folder / "best"
    for step in list_saved_steps(best):
        if not is_whole(best, step) and is_whole(folder, step):
            remove(best)


def prepare_list(folder: Path) -> None:
    """Prepares the file ``checkpoint``, which lists the checkpoints that a manager may delete.

    The file may be empty, for example after a power cut. An empty file is removed, because a
    manager cannot be created with it.

    Args:
        folder: the run's checkpoint folder, before ``create_ckpt`` creates a manager for it

    Raises:
        SetupError: the list, which another person may have written, contains a path outside the
            folder.
    """
    try:
        state = tf.train.get_checkpoint_state(str(folder))
    except ValueError:
        (folder / "checkpoint").unlink(missing_ok=True)
        return
    if state is None:
        return
    for path in state.all_model_checkpoint_paths:
        if Path(os.path.abspath(path)).parent != folder:
            raise SetupError(
                f"{relative_path(folder / 'checkpoint')}: lists {format_name(path)}, which is "
                "outside the folder and would be deleted as an old checkpoint; remove this "
                "list: the run can be resumed without it."
            )


def keep_best(folder: Path, record: Record, source: Path) -> None:
    """Copies the best checkpoint to the folder ``best``, unless it is there already.

    Args:
        folder: the run's checkpoint folder
        record: the record of the newest checkpoint, which contains the best step
        source: the folder with the newest checkpoint; after a fork, the checkpoint folder of the
            original run
    """
    step = find_best_step(record.progress["best"])
    best = folder / "best"
    if step < 0:
        return
    for place in (source, source / "best"):
        if step in list_saved_steps(place) and step not in list_saved_steps(best):
            with atomic_write(best) as temporary:
                copy_checkpoint(place, step, temporary)
