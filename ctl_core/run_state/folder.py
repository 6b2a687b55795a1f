"""The folder of checkpoints: put in order before it is used, and after each checkpoint."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

import tensorflow as tf

from ctl_core.console import Console
from ctl_core.errors import SetupError, reason
from ctl_core.files import from_here, written_whole
from ctl_core.run_state.record import (
    NAME,
    PART,
    Damaged,
    Record,
    read_record,
    saved_steps,
    steps_of,
)
from ctl_core.selection import best_step


def repair_list(folder: Path, reading: bool = False) -> None:
    """Makes the manager's own list of checkpoints anew if it is damaged or gone.

    A CheckpointManager refuses to start with a damaged list, also where the run is only read, and
    would never delete what a missing one does not name.

    Raises:
        SetupError: it cannot be written.
    """
    file = folder / "checkpoint"
    try:
        if file.exists() and not file.is_file():  # a named pipe would keep us waiting
            file.unlink()
        listed = tf.train.get_checkpoint_state(str(folder)) is not None
    except OSError as error:
        raise SetupError(f"{from_here(file)}: expected a file, not a folder; remove it.") from error
    except ValueError:  # empty, or no text any more
        listed = False
    steps = sorted(saved_steps(folder / "engine"))
    if listed or (not file.exists() and (reading or not steps)):
        return
    try:
        file.unlink(missing_ok=True)
        if steps:  # TensorFlow's function for it is deprecated, and says so
            lines = [f'all_model_checkpoint_paths: "ckpt-{step}"\n' for step in steps]
            with written_whole(file) as beside:
                beside.write_text(f'model_checkpoint_path: "ckpt-{steps[-1]}"\n' + "".join(lines))
    except OSError as error:
        raise SetupError(
            f"{from_here(file)}: is damaged and cannot be written anew: {reason(error)}; copy the "
            "run to where you may write."
        ) from error


def clean(folder: Path, console: Console) -> None:
    """Removes what a process that was killed while saving left half-written.

    What is no file and has a file's name, such as a named pipe, is moved out of the way.
    """
    for each in (folder, folder / "engine"):
        for path in each.glob("*-*.*"):
            if NAME.fullmatch(path.name) and not path.is_file():
                aside = path.rename(path.with_name(f"{path.name}.aside"))
                console.warn(f"{path} is no file; it is called {aside.name} now.")
        for path in each.glob("*_temp"):
            shutil.rmtree(path, ignore_errors=True)
        for path in each.glob("*.tmp"):
            if not path.is_dir():
                path.unlink()


def remove_orphans(folder: Path) -> None:
    """Removes engine parts whose user part the manager has deleted, or that do not count.

    Each folder is listed once: this comes with every checkpoint.
    """
    named, engine = set(), folder / "engine"
    users, ours = set(os.listdir(folder)), set(os.listdir(engine))
    for step in steps_of(ours):
        record = engine / f"ckpt-{step}.json"
        with contextlib.suppress(Damaged, FileNotFoundError):  # restore says so
            path, vocabularies = _names(engine, step, record.stat().st_mtime_ns)
            named.add(vocabularies)
            if f"{path}.index" not in users:
                record.unlink()
                ours.remove(record.name)
    for name in ours:
        part = PART.fullmatch(name.split(".")[0]) if NAME.fullmatch(name) else None
        lost = part is not None and f"ckpt-{part[1]}.json" not in ours
        if lost or (fnmatch(name, "vocabularies-*.json") and name not in named):
            (engine / name).unlink(missing_ok=True)


@functools.lru_cache(maxsize=4096)
def _names(engine: Path, step: int, _written: int) -> tuple[str, str | None]:
    """Returns what a record names: the user's part and the vocabularies. Read once as written."""
    record = read_record(engine, step)
    return record.path, record.vocabularies


def keep_best(folder: Path, record: Record) -> None:
    """Keeps a checkpoint in the folder ``best`` as well, instead of the one that is there.

    The record comes last, and before the other one goes.
    """
    best = folder / "best"
    kept = copy_checkpoint(folder, record, best, ("ckpt",))
    stale = [path for path in best.rglob("*") if path.is_file() and path not in kept]
    for path in sorted(stale, key=lambda path: path.suffix != ".json"):
        path.unlink()


def keep_best_again(folder: Path, record: Record) -> None:
    """Keeps the best checkpoint if the process that was to do so was killed before.

    Args:
        folder: of checkpoints
        record: of the newest, which knows which is the best
    """
    step, engine = best_step(record.best), folder / "engine"
    if step in saved_steps(engine) and step not in saved_steps(folder / "best" / "engine"):
        with contextlib.suppress(Damaged):
            keep_best(folder, read_record(engine, step))


def copy_checkpoint(
    folder: Path, record: Record, to: Path, kinds: tuple[str, ...] = ("ckpt", "input", "statistics")
) -> list[Path]:
    """Copies a checkpoint to another folder; its record last.

    Its files are shared, not copied, where the file system can do that.

    Args:
        folder: where it is
        record: its record
        to: where it is copied to
        kinds: of what the engine has written of it

    Returns:
        The copies.

    Raises:
        OSError: one cannot be written.
    """
    step = record.step
    (to / "engine").mkdir(parents=True, exist_ok=True)
    parts = [*folder.glob(f"{record.path}.*")]
    for kind in kinds:  # of each process; the engine's part of all
        parts += folder.glob(f"engine/{kind}-{step}.[id]*")
        parts += folder.glob(f"engine/{kind}-{step}-*.*")
    if record.vocabularies is not None:
        parts.append(folder / "engine" / record.vocabularies)
    parts.append(folder / "engine" / f"ckpt-{step}.json")
    copies = [to / path.relative_to(folder) for path in parts]
    for path, copy in zip(parts, copies, strict=True):
        with written_whole(copy) as beside:
            try:
                os.link(path, beside)
            except OSError:
                shutil.copy2(path, beside)
    return copies
