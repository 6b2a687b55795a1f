"""Writes files atomically, locks files, and formats paths for messages."""

import contextlib
import itertools
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ctl_core.run.errors import SetupError, format_name

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# The name of the lock file in a run's folder. The process that trains the run locks the file and
# writes its process ID to it.
LOCK = "pid"
# The characters of patterns in TensorFlow. On Windows, the backslash separates folders.
_PATTERN_CHARACTERS = "*?[]" if os.sep == "\\" else "*?[]\\"


def relative_path(path: str | Path) -> str:
    """Returns a path, relative to the current folder if it is inside, otherwise absolute."""
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    if relative.split(os.sep)[0] == os.pardir:
        return absolute
    return relative


def find_pattern_character(path: str | Path) -> str | None:
    """Returns the first character of a path that has a meaning in a pattern of file names, if any.

    TensorFlow reads and deletes the files of checkpoints and caches by patterns. In a folder called
    ``exp?``, it would read and delete the files of ``exp1`` as well; in ``[x]``, it finds nothing.
    """
    match = re.search(f"[{re.escape(_PATTERN_CHARACTERS)}]", str(path))
    if match is None:
        return None
    return match[0]


def refuse_patterns(setting: str, path: str | Path) -> None:
    """Refuses a folder of checkpoints whose path TensorFlow would interpret as a pattern.

    Args:
        setting: the setting that names the folder, for the message
        path: the path of the folder; a relative path is made absolute

    Raises:
        SetupError: the path contains a character of patterns.
    """
    absolute = os.path.abspath(path)
    character = find_pattern_character(absolute)
    if character is not None:
        raise SetupError(
            f"{setting}: {format_name(absolute)} contains {character!r}, so TensorFlow takes it "
            "for a pattern, and could read or delete the checkpoints of other folders; rename the "
            f"folder, or choose another one: a path without {' '.join(_PATTERN_CHARACTERS)}"
        )


def prepare_output(setting: str, folder: Path) -> None:
    """Creates a folder for an output, and checks that files can be written there.

    Args:
        setting: the setting that names the output, for the message
        folder: the folder

    Raises:
        SetupError: the folder cannot be created or written.
    """
    with explain_failure(setting, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextlib.contextmanager
def explain_failure(setting: str, path: Path) -> Iterator[None]:
    """Raises a one-line error if a file or folder cannot be written.

    Raises:
        SetupError: the context raises an OSError, for example on a disk that is read-only.
    """
    try:
        yield
    except OSError as error:
        cause = error.strerror or error
        raise SetupError(
            f"{setting}: {relative_path(path)} cannot be written: {cause}; choose another folder, "
            "or change its permissions."
        ) from error


def is_stdout(path: Path) -> bool:
    """Returns True if the standard output of this process is redirected to this file.

    For example, the output of a run in the background is redirected to its train.log.
    """
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Replaces a file or folder with one that the body of the context writes.

    If the body raises an error, nothing is replaced. A symbolic link is replaced, not followed. A
    new file is flushed to the disk before it replaces the old one, so that a power cut does not
    leave an empty file.

    Args:
        path: the path of the file or folder to replace

    Yields:
        A temporary path in the same folder, where the body writes the new file or folder.
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
        newest: the path prefix of the newest checkpoint
        times: the checkpoints that a manager may delete, oldest first: the time at which each was
            written (seconds since 1970), by path prefix
        last_preserved: the time of the last checkpoint that is never deleted; None omits this line
    """
    lines = [f"model_checkpoint_path: {_quote(newest)}"]
    lines += [f"all_model_checkpoint_paths: {_quote(path)}" for path in times]
    lines += [f"all_model_checkpoint_timestamps: {time!r}" for time in times.values()]
    if last_preserved is not None:
        lines.append(f"last_preserved_timestamp: {last_preserved!r}")
    return "\n".join([*lines, ""])


def _quote(text: str) -> str:
    """Returns a string in quotes, escaped as in the text format of protocol buffers."""
    for character, escaped in (("\\", r"\\"), ('"', r"\""), ("'", r"\'"), ("\n", r"\n")):
        text = text.replace(character, escaped)
    return f'"{text}"'


def flush_to_disk(*paths: Path) -> None:
    """Flushes the content of files, and the directory entries of folders, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with its content; does nothing if it does not exist."""
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
    try:
        return _try_lock(file)
    except OSError as error:
        logging.getLogger("ctl_core").warning("%s cannot be locked: %s", file.name, error)
        return True


def _try_lock(file: IO[Any] | int) -> bool:
    """Locks an open file or folder; returns False if another process holds the lock.

    Raises:
        OSError: the file system cannot lock it.
    """
    for _ in range(3):  # retries, because ``is_run_locked`` in another process locks for a moment
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.1)
    return False


def _lock_folder(folder: Path) -> int | None:
    """Locks a folder itself, until the returned descriptor is closed or this process ends.

    Returns:
        The descriptor of the folder; None if another process holds the lock. The folder is not
        locked if the system or file system cannot lock folders, as over NFS.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_ours = _try_lock(descriptor)
    except OSError:
        return descriptor
    if is_ours:
        return descriptor
    os.close(descriptor)
    return None


# The descriptors of the locked folders, by the open file ``pid`` in them.
_locked_folders: dict[IO[str], int] = {}


def lock_run(folder: Path) -> IO[str] | None:
    """Locks the folder of a run for this process, and writes the process ID to the file ``pid``.

    The file ``pid`` is locked rather than the log, because the log may be rotated or removed while
    the run continues. The folder itself is locked, too, in case the file ``pid`` is removed.

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
        # The process that held the lock may have removed the file after this process opened it.
        if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
            if fcntl is not None:
                descriptor_of_folder = _lock_folder(folder)
                if descriptor_of_folder is None:  # the file ``pid`` of that process was removed
                    path.unlink(missing_ok=True)
                    file.close()
                    return None
                _locked_folders[file] = descriptor_of_folder
            file.truncate()
            file.write(f"{os.getpid()}\n")
            file.flush()
            return file
        file.close()


def release_run(folder: Path, lock: IO[str]) -> None:
    """Removes the file ``pid`` and releases the lock.

    If the file remained, a user could kill a later process that happens to have the same ID.
    """
    with contextlib.suppress(OSError):
        (folder / LOCK).unlink(missing_ok=True)
    lock.close()
    descriptor_of_folder = _locked_folders.pop(lock, None)
    if descriptor_of_folder is not None:
        os.close(descriptor_of_folder)


def is_run_locked(folder: Path) -> bool:
    """Returns whether a process trains the run in this folder."""
    if is_locked(folder / LOCK):
        return True
    if fcntl is None or not folder.is_dir():
        return False
    descriptor = _lock_folder(folder)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def is_locked(path: Path) -> bool:
    """Returns True if a process holds the lock of a file; False if the system has no locks."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return not lock_file(file)


def choose_run_name(runs_dir: Path) -> str:
    """Returns the current time as the name of a run; appends a number if a folder has this name."""
    now = time.strftime("%Y%m%d-%H%M%S")
    name = now
    for number in itertools.count(2):
        if not os.path.lexists(runs_dir / name):
            break
        name = f"{now}-{number}"
    return name
