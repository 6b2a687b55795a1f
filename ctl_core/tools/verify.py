"""``ctl_core tfrecords --verify``: whether TFRecord files are as they were written."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ctl_core.console import Console
from ctl_core.data.manifest import NAME, Manifest, Shard, read
from ctl_core.errors import RunError
from ctl_core.files import from_here


def verify(folder: Path, console: Console | None = None) -> None:
    """Reads each file and index of a folder, and compares them with the manifest.

    Says a line for each that is damaged.

    Raises:
        SetupError: there is no manifest, or it is damaged.
        RunError: files are damaged, or not all of them are written.
    """
    console = console or Console()
    manifest = read(folder)
    where = from_here(manifest.folder)
    damaged = 0
    for shard in manifest.shards:
        for why in _wrong(manifest, shard):
            console.say(f"{where}/{why}")
            damaged += 1
    again = "give the command that wrote them again, which writes what is missing"
    if damaged:
        raise RunError(
            f"{where}: {damaged} of its files are not as they were written; delete them, and "
            f"{again}."
        )
    if not manifest.complete:
        raise RunError(
            f"{where}/{NAME}: only {len(manifest.shards)} of {manifest.planned} files are written; "
            f"{again}."
        )
    examples = sum(shard.examples for shard in manifest.shards)
    console.say(f"{where}: {examples} examples in {len(manifest.shards)} files, as written.")


def _wrong(manifest: Manifest, shard: Shard) -> list[str]:
    """Says of a file and its index what is wrong, each by its name."""
    found = []
    for path, size, digest in (
        (manifest.records(shard), shard.bytes, shard.sha256),
        (manifest.index(shard), 16 * shard.examples, shard.index_sha256),
    ):
        try:
            with path.open("rb") as file:
                if (length := path.stat().st_size) != size:
                    found.append(f"{path.name}: has {length} bytes, not {size}")
                elif hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    found.append(f"{path.name}: has another checksum than when it was written")
        except OSError as error:
            found.append(f"{path.name}: {error.strerror}")
    return found
