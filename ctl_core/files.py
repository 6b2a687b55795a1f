"""Files written whole or not at all, links that lead elsewhere, paths in messages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from ctl_core.errors import SetupError, one_line


def from_here(path: str | Path) -> str:
    """Returns a path relative to the current folder where it is inside it, absolute otherwise."""
    with contextlib.suppress(OSError):  # the current folder is gone
        for place, here in (
            (os.path.abspath(path), os.getcwd()),
            (os.path.realpath(path), os.path.realpath(os.getcwd())),
        ):
            inside = os.path.relpath(place, here)
            if inside.split(os.sep)[0] != os.pardir:
                return inside
        return os.path.abspath(path)
    return str(path)


def is_stdout(path: Path) -> bool:
    """Whether this process prints into a file, as one that train.sh has sent to the background."""
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


@contextlib.contextmanager
def written_whole(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yields a place beside a path; what is written there takes the path's own at the end.

    A symbolic link at either place is replaced, not followed. What was there before stays if
    anything is raised.

    Args:
        path: the file
        folder: whether a folder is written instead, in place of a folder

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(path.name + ".tmp")
    _remove(beside, folder)
    try:
        yield beside
        if folder:  # no rename replaces a folder that is not empty
            _remove(path, folder)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(beside, folder)
        raise


def _remove(path: Path, folder: bool) -> None:
    if folder and path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse_links(folder: Path, paths: Iterable[Path]) -> None:
    """Refuses symbolic links that lead out of a folder, at these paths in it and below them.

    The folder may itself be a link, and one that stays in it is none of our business.

    Raises:
        SetupError: there is one; what is written there would land elsewhere.
    """
    home = os.path.realpath(folder)
    for path in paths:
        below = (
            os.path.join(root, name)
            for root, folders, files in os.walk(path)
            for name in (*folders, *files)
        )
        for each in (str(path), *below):
            if not os.path.islink(each):
                continue
            target = os.path.realpath(each)
            if os.path.commonpath([home, target]) != home:
                raise SetupError(
                    f"{one_line(from_here(each))}: a symbolic link that leads out of the run "
                    f"folder, to {one_line(target)}, where nothing is to be written; remove it, "
                    "or put a copy there (the run folder as a whole may be a link)."
                )
