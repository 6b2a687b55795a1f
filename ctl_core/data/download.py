"""Files of data that are downloaded once, by Keras, to where Keras keeps its own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import keras

from ctl_core.console import Console
from ctl_core.errors import SetupError, one_line
from ctl_core.files import from_here

_HASHES = {32: "md5", 64: "sha256"}  # by their length in hexadecimal digits


def download(url: str, file_hash: str, folder: str) -> Path:
    """Returns where a file is, which is downloaded if it is not there.

    ``keras.utils.get_file`` downloads it, with a progress bar on a terminal, beside its place; it
    gets its name when its checksum is right. A file that is there already is taken as it is, also
    one that was put there by hand; one line says so if it is not the published one.

    Args:
        url: of the file; its last part is the file's name
        file_hash: the published MD5 or SHA-256 of the file, in hexadecimal digits
        folder: below ``datasets`` of Keras' folder, which is ``~/.keras`` or ``$KERAS_HOME``

    Raises:
        SetupError: it cannot be downloaded; the message says which file to put where. Or what came
            is not the published file.
        ValueError: the hash has another length than those two.
    """
    if len(file_hash) not in _HASHES:
        raise ValueError(f"file_hash: expected an MD5 or a SHA-256 in hex, got {file_hash!r}")
    home = Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
    path = home / "datasets" / folder / url.rpartition("/")[2]
    if path.exists():
        status = path.stat()
        _look_at(path, file_hash, status.st_size, status.st_mtime_ns)
        return path
    Console().say(f"downloading {url} to {path}")
    # Processes of one machine may do so at once: each beside, under a name of its own.
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _progress_on_terminals():
            keras.utils.get_file(beside.name, url, cache_subdir=str(path.parent))
        if (found := _hash_of(beside, file_hash)) != file_hash:
            raise ValueError(f"what came has the checksum {found}, not {file_hash}")
        beside.replace(path)
    except Exception as error:  # Keras raises just that
        why = str(error).rpartition(" -- ")[2]  # before it Keras names the URL, as we do
        raise SetupError(
            f"{url}: cannot be downloaded ({one_line(why, 200)}); download it in another way, "
            f"and put it at {path}."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return path


@functools.cache
def _look_at(path: Path, file_hash: str, size: int, changed: int) -> None:
    """Says once of a file, until it changes, that it is not the published one."""
    del size, changed
    if (found := _hash_of(path, file_hash)) != file_hash:
        Console().say(
            f"{from_here(path)} is not the published file (its checksum is {found}, not "
            f"{file_hash}); it is taken as it is. Delete it to have that one downloaded."
        )


def _hash_of(path: Path, like: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _HASHES[len(like)]).hexdigest()


@contextlib.contextmanager
def _progress_on_terminals() -> Iterator[None]:
    """Within, Keras shows its progress bar on a terminal only: elsewhere, it is many lines."""
    shown = keras.config.is_interactive_logging_enabled()
    if not sys.stdout.isatty():
        keras.config.disable_interactive_logging()
    try:
        yield
    finally:
        if shown:
            keras.config.enable_interactive_logging()
