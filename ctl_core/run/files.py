"""Atomic writes, file locks, and paths as messages show them."""

import contextlib
import itertools
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# The file in a run's folder that the process that trains the run locks; it holds its number.
LOCK = "pid"


def relative_path(path: str | Path) -> str:
    """Returns a path relative to the current folder if it is inside of it, otherwise absolute."""
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    if relative.split(os.sep)[0] == os.pardir:
        return absolute
    return relative


def is_stdout(path: Path) -> bool:
    """Returns True if this process prints to a file, as when train.sh runs in the background."""
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Replaces a file or folder by the one written in the context, or leaves it as it was.

    If the body raises, nothing changes. A symbolic link is replaced, not followed. A file is
    flushed to the disk before it takes its place, so a power cut does not leave an empty one.

    Args:
        path: of the file or folder

    Yields:
        A temporary path next to it, where the body writes a file or folder.
    """
    temporary = path.with_name(path.name + ".tmp")
    remove(temporary)
    try:
        yield temporary
        if temporary.is_dir():  # a rename cannot replace a folder that is not empty
            remove(path)
        else:
            flush_to_disk(temporary)
        os.replace(temporary, path)
        flush_to_disk(path.parent)
    finally:
        remove(temporary)


def format_checkpoint_list(
    newest: str, times: Mapping[str, float], last_preserved: float | None = None
) -> str:
    """Returns the text of the file ``checkpoint``, as TensorFlow writes it.

    Args:
        newest: the newest checkpoint, as the prefix of its files
        times: for each checkpoint that a manager may delete, the time when it was written (seconds
            since 1970), oldest first
        last_preserved: the time of the last checkpoint that is never deleted; None: not written
    """
    lines = [f"model_checkpoint_path: {_quote(newest)}"]
    lines += [f"all_model_checkpoint_paths: {_quote(path)}" for path in times]
    lines += [f"all_model_checkpoint_timestamps: {time!r}" for time in times.values()]
    if last_preserved is not None:
        lines.append(f"last_preserved_timestamp: {last_preserved!r}")
    return "\n".join([*lines, ""])


def _quote(text: str) -> str:
    """Returns a text in quotes, in the text format of protocol buffers."""
    for character, escaped in (("\\", r"\\"), ('"', r"\""), ("'", r"\'"), ("\n", r"\n")):
        text = text.replace(character, escaped)
    return f'"{text}"'


def flush_to_disk(*paths: Path) -> None:
    """Flushes the content of files, and the names in folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that is in it; does nothing if it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock_file(file: IO[Any]) -> bool:
    """Locks an open file until it is closed or this process ends.

    Returns:
        False if another process holds the lock. True if the file is locked now, or if the system
        or file system has no locks.
    """
    if fcntl is None:
        return True
    for _ in range(3):  # is_locked of another process holds the lock for an instant
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.1)
        except OSError as error:
            logging.getLogger("ctl_core").warning("%s cannot be locked: %s", file.name, error)
            return True
    return False


def lock_run(folder: Path) -> IO[str] | None:
    """Locks the folder of a run for this process, whose number is written to the file ``pid``.

    The log would not do: a log may be rotated or removed while the run goes on.

    Returns:
        The open file, for ``release_run``; None if another process holds the lock.
    """
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        file = os.fdopen(descriptor, "r+")
        if not lock_file(file):
            file.close()
            return None
        # The process that held the lock may have removed the file since it was opened here.
        if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
            file.truncate()
            file.write(f"{os.getpid()}\n")
            file.flush()
            return file
        file.close()


def release_run(folder: Path, lock: IO[str]) -> None:
    """Removes the file ``pid``, so that nobody kills a later process of this number by it."""
    with contextlib.suppress(OSError):
        (folder / LOCK).unlink(missing_ok=True)
    lock.close()


def is_run_locked(folder: Path) -> bool:
    """Returns whether a process trains the run in this folder."""
    return is_locked(folder / LOCK)


def is_locked(path: Path) -> bool:
    """Returns True if a process holds the lock of a file; False if there are no locks."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return not lock_file(file)


def choose_run_name(runs_dir: Path) -> str:
    """Returns the current time as a name for a run, with a number after it if it is taken."""
    now = time.strftime("%Y%m%d-%H%M%S")
    name = now
    for number in itertools.count(2):
        if not os.path.lexists(runs_dir / name):
            break
        name = f"{now}-{number}"
    return name
