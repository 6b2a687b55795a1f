"""Files written whole or not at all, files that one process holds, paths in messages."""

import contextlib
import itertools
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def relative_path(path: str | Path) -> str:
    """Returns a path relative to the current folder where it is inside it, absolute otherwise."""
    absolute = os.path.abspath(path)
    inside = os.path.relpath(absolute)
    return absolute if inside.split(os.sep)[0] == os.pardir else inside


def is_stdout(path: Path) -> bool:
    """Whether this process prints into a file, as one that train.sh has sent to the background."""
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a place beside a path; the file or folder written there takes the path's own place.

    A symbolic link there is replaced, not followed. If anything is raised, what was there stays.
    """
    beside = path.with_name(path.name + ".tmp")
    _remove(beside)
    try:
        yield beside
        if beside.is_dir():  # no rename replaces a folder that is not empty
            _remove(path)
        os.replace(beside, path)
    finally:
        _remove(beside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock_file(file: IO[Any]) -> bool:
    """Locks an open file until it is closed or this process ends; False if another one has.

    Where there are no locks, it is taken for locked.
    """
    for _ in range(3 if fcntl else 0):  # who only looks holds it for an instant
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.1)
        except OSError as error:
            logging.getLogger("ctl_core").warning("%s cannot be locked: %s", file.name, error)
            return True
    return fcntl is None


def is_locked(path: Path) -> bool:
    """Whether a process holds a file; False where there are no locks to tell."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return not lock_file(file)


def choose_run_name(runs_dir: Path) -> str:
    """Returns the time as a name for a run; with a number behind it if that second is taken."""
    now = time.strftime("%Y%m%d-%H%M%S")
    names = (now if number == 1 else f"{now}-{number}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(runs_dir / name))
