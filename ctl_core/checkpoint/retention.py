"""Which checkpoints of a run are kept: those that the manager keeps, and a copy of the best.

The manager of ``create_ckpt`` deletes the oldest user's parts in the run's folder of checkpoints,
not in the folders within it. The engine follows it in ``keep_and_remove``.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import tensorflow as tf

from ctl_core.checkpoint.record import (
    Record,
    is_whole,
    list_engine_steps,
    list_files,
    list_names,
    list_saved_steps,
)
from ctl_core.model.state import State
from ctl_core.run.errors import SetupError, format_name
from ctl_core.run.files import atomic_write, relative_path, remove

# The temporary names of TensorFlow and of ``atomic_write`` in a folder of checkpoints.
_TEMPORARY = re.compile(
    r".+-\d+_temp|.+\.tempstate\d+|checkpoint\.tmp\w+|best\.tmp|ckpt-\d+\.json\.tmp"
)


def keep_and_remove(state: State, record: Record, source: Path | None = None) -> None:
    """Keeps a copy of the best checkpoint, and removes what the manager no longer keeps.

    Called on the chief after each checkpoint, in the thread that has written it; and when a run
    starts from a checkpoint, since the process that wrote it may have been killed before the call.

    Args:
        state: of the run, with its settings and manager
        record: of the newest checkpoint
        source: the folder with that checkpoint; default: that of the run
    """
    folder = Path(state.manager.directory)
    keep_best(folder, record, source or folder)
    remove_orphans(folder)


def remove_orphans(folder: Path) -> None:
    """Removes the engine's files of checkpoints whose user's part the manager has deleted.

    A user's part under another prefix, which the manager does not delete, keeps a checkpoint.
    The record is removed first, so that a checkpoint that is half removed does not count. What a
    kill between two removals has left is removed the next time.
    """
    prefixes = [Path(name).stem for name in list_names(folder) if name.endswith(".index")]
    kept = {prefix.rpartition("-")[2] for prefix in prefixes}
    for step in list_engine_steps(folder):
        if str(step) in kept:
            continue
        for path in reversed(list_files(folder, step)):
            path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Removes what a killed process may have left: temporary files, and a copy that is not whole.

    A damaged copy of the best checkpoint is removed only if that checkpoint is whole in the folder,
    from where ``keep_best`` copies it again.

    Args:
        folder: the run's folder of checkpoints, in which no process writes now
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
    """Prepares the file ``checkpoint``, the list that a manager reads and deletes by.

    No manager starts with an empty file, which a power cut may leave; it is removed.

    Args:
        folder: the run's folder of checkpoints, before ``create_ckpt`` makes a manager for it

    Raises:
        SetupError: the list, which somebody else may have written, has a path outside of the
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
                "outside of the folder and would be deleted as an old checkpoint; remove the file, "
                "which no resumed run needs."
            )


def find_best_step(best: dict[str, list[float]]) -> int:
    """Returns the step of the checkpoint that ``keep_best`` keeps, or -1.

    Args:
        best: by criterion the best value, its step, and the evaluations since; see ``Criterion``
    """
    steps = [int(step) for key, (_, step, _) in best.items() if key.startswith("keep_best=")]
    return max(steps, default=-1)


def keep_best(folder: Path, record: Record, source: Path) -> None:
    """Copies the best checkpoint to the folder ``best``, unless it is there already.

    Args:
        folder: the run's folder of checkpoints
        record: of the newest checkpoint, which knows the best step
        source: the folder with the newest checkpoint: that of another run after a fork
    """
    step = find_best_step(record.progress["best"])
    best = folder / "best"
    if step < 0:
        return
    for place in (source, source / "best"):
        if step in list_saved_steps(place) and step not in list_saved_steps(best):
            with atomic_write(best) as temporary:
                copy_checkpoint(place, step, temporary)


def copy_checkpoint(folder: Path, step: int, target: Path) -> None:
    """Copies a checkpoint; the copy shares its files where the file system supports that.

    Args:
        folder: with the checkpoint
        step: of the checkpoint
        target: the folder for this copy alone, which must not exist yet
    """
    (target / "engine").mkdir(parents=True)
    for path in list_files(folder, step):
        copy = target / path.relative_to(folder)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copy2(path, copy)
