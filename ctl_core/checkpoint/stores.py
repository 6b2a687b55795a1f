"""Copies files to and from the storage of a mirror: a folder, or a bucket in a cloud.

mirror.py decides which files are copied, and in which order.

Folders need no additional package. Buckets need ``fsspec``, which is imported only if the setting
``mirror`` names a bucket.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ctl_core.checkpoint.record import list_names
from ctl_core.run.errors import SetupError, format_error
from ctl_core.run.files import flush_to_disk

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# The URL schemes of stores without folders. Creating a folder there would create the bucket.
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")


class Store(Protocol):
    """Storage for the files of one run.

    Paths are relative to the root of the storage, and use slashes.
    Every method raises an OSError if the storage cannot be reached, is full, or denies access.
    """

    def list_names(self, folder: str) -> list[str]:
        """Returns the names of the files in a folder; an empty list if it does not exist."""

    def measure(self, path: str) -> int | None:
        """Returns the size of a file in bytes; None if the storage does not know it.

        Raises FileNotFoundError if the file does not exist.
        """

    def download(self, path: str, target: Path) -> None:
        """Copies a file to this machine; raises FileNotFoundError if it does not exist."""

    def upload(self, source: Path, path: str) -> None:
        """Copies a file of this machine to the store, and replaces an existing file."""

    def remove(self, path: str) -> None:
        """Removes a file; does nothing if it does not exist."""


class FolderStore:
    """A folder in the file system of this machine.

    Attributes:
        root: the folder
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def list_names(self, folder: str) -> list[str]:
        """Returns the names in a folder; an empty list if it does not exist."""
        return list_names(self.root / folder)

    def measure(self, path: str) -> int:
        """Returns the size of a file in bytes."""
        return (self.root / path).stat().st_size

    def download(self, path: str, target: Path) -> None:
        """Copies a file out of the folder."""
        shutil.copyfile(self.root / path, target)

    def upload(self, source: Path, path: str) -> None:
        """Copies a file into the folder; a kill never leaves an incomplete file at ``path``."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # The name of the temporary file is fixed, so that kills leave at most one such file.
        temporary = self.root / "upload.tmp"
        shutil.copyfile(source, temporary)
        flush_to_disk(temporary)
        os.replace(temporary, target)
        flush_to_disk(target.parent)

    def remove(self, path: str) -> None:
        """Removes a file."""
        (self.root / path).unlink(missing_ok=True)


class FsspecStore:
    """Storage that ``fsspec`` can access, such as a bucket.

    Credentials and options are read from the environment, as the cloud's own tools do.
    """

    def __init__(self, url: str) -> None:
        """Prepares the access to a URL, and connects to it if that is possible now.

        Raises:
            SetupError: the package for this kind of URL is not installed or does not exist.
        """
        try:
            import fsspec
        except ImportError as error:
            raise SetupError(
                f"mirror: {url} needs fsspec, and a package for this kind of URL, such as s3fs or "
                "gcsfs: python -m pip install fsspec s3fs"
            ) from error
        self._has_folders = url.partition(":")[0] not in _BUCKETS
        self._url = url
        self._connect: Callable[[str], tuple[Any, str]] = fsspec.core.url_to_fs
        with contextlib.suppress(OSError):  # a later call connects again, and reports the error
            self._connection  # noqa: B018

    @functools.cached_property
    def _connection(self) -> tuple[Any, str]:
        """The file system of ``fsspec``, and the path in it.

        Raises:
            SetupError: there is no package for this kind of URL.
            OSError: the storage refuses the connection.
        """
        try:
            return self._connect(self._url)
        except (ImportError, ValueError) as error:
            raise SetupError(
                f"mirror: {self._url} cannot be used: {format_error(error)}"
            ) from error
        except OSError:
            raise
        except Exception as error:
            raise OSError(format_error(error)) from error

    @property
    def _files(self) -> Any:
        """The file system of ``fsspec``."""
        return self._connection[0]

    def list_names(self, folder: str) -> list[str]:
        """Returns the names in a folder, without using a cache; an empty list if it is missing."""
        with _raise_os_errors():
            self._files.invalidate_cache()
            try:
                paths = self._files.ls(self._locate(folder), detail=False)
            except FileNotFoundError:
                return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def measure(self, path: str) -> int | None:
        """Returns the size of a file in bytes; None if the storage does not know it."""
        with _raise_os_errors():
            size: int | None = self._files.info(self._locate(path)).get("size")
        return size

    def download(self, path: str, target: Path) -> None:
        """Copies a file to this machine."""
        with _raise_os_errors():
            self._files.get_file(self._locate(path), str(target))

    def upload(self, source: Path, path: str) -> None:
        """Copies a file of this machine."""
        with _raise_os_errors():
            if self._has_folders:
                self._files.makedirs(self._locate(path).rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(source), self._locate(path))

    def remove(self, path: str) -> None:
        """Removes a file."""
        with _raise_os_errors(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._locate(path))

    def _locate(self, path: str) -> str:
        """Returns the full path of a file in the file system of ``fsspec``."""
        return f"{self._connection[1].rstrip('/')}/{path}".rstrip("/")


@contextlib.contextmanager
def _raise_os_errors() -> Iterator[None]:
    """Raises an OSError in place of any other exception of a cloud's package."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(format_error(error)) from error


def find_local_path(mirror: str) -> Path | None:
    """Returns the folder that a path or a ``file://`` URL refers to; None for any other URL."""
    path = mirror.removeprefix("file://")
    if _SCHEME.match(path):
        return None
    return Path(path).absolute()


def locate_mirror(mirror: str | None, folder: Path) -> str | None:
    """Returns the setting ``mirror``; a path relative to ``folder`` becomes absolute."""
    if mirror is None or find_local_path(mirror) is None:
        return mirror
    return str(folder / mirror.removeprefix("file://"))


def open_store(mirror: str, name: str) -> Store:
    """Opens the storage of a run in its mirror.

    Args:
        mirror: the setting ``mirror``
        name: the name of the run, which is appended to the path

    Raises:
        SetupError: a package is missing, or no package supports this kind of URL.
    """
    folder = find_local_path(mirror)
    if folder is not None:
        return FolderStore(folder / name)
    return FsspecStore(f"{mirror.rstrip('/')}/{name}")
