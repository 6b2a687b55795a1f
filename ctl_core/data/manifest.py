"""The manifest of a folder of TFRecord files: what is in them, and whether they are all there.

Beside each ``NAME.tfrecord`` stands ``NAME.index``: of each record, in order, where it begins in
the file (bytes) and the hash of its example's key, both int64, little-endian.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ctl_core.errors import SetupError
from ctl_core.files import from_here, written_whole
from ctl_core.settings import nearest, shown

NAME = "manifest.json"
FORMAT = 1
# The collections of ``opened`` that are being made.
_OPENED: list[dict[str, str]] = []
# What a record holds beside its data: its length, and checksums of both (bytes).
FRAME = 16


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of all examples.

    Attributes:
        dtype: as it is read: the name of a TensorFlow type
        shape: of one example; None where examples differ
        encoding: ``value``, a number or text; ``raw``, the bytes of an array, little-endian;
            ``image``, a file of a format that ``tf.io.decode_image`` reads; ``ragged``, a list
    """

    dtype: str
    shape: list[int | None]
    encoding: str


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        name: without ending
        split: to which it belongs
        examples: how many there are in it
        bytes: its size
        sha256: of the file
        index_sha256: of its index
        shapes: of images, as far as they are all the same in it
        skipped: damaged input that is not in it, and why
    """

    name: str
    split: str
    examples: int
    bytes: int
    sha256: str
    index_sha256: str
    shapes: dict[str, list[int | None]]
    skipped: list[list[str]]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What is in a folder.

    Attributes:
        folder: of the files
        complete: whether all that were planned are written
        planned: how many files that are
        source: what they were made of, as it was named
        plan: a hash of the source and of the options that decide what is written where
        label: the feature that is to be predicted, if one was named
        class_names: of a label that was text: its number is the place here
        features: by name
        shards: the files
        skipped: damaged input that was found before a file was begun, and why
    """

    folder: Path
    complete: bool
    planned: int
    source: str
    plan: str
    label: str | None
    class_names: list[str]
    features: dict[str, Feature]
    shards: list[Shard]
    skipped: list[list[str]]

    def splits(self) -> list[str]:
        """The names of the splits, in the order of the files."""
        return list(dict.fromkeys(shard.split for shard in self.shards))

    def of(self, split: str) -> list[Shard]:
        """Returns the files of a split.

        Raises:
            SetupError: there is none of that name.
        """
        found = [shard for shard in self.shards if shard.split == split]
        if not found:
            raise SetupError(
                f"{from_here(self.folder / NAME)}: there is no split {shown(split)}"
                f"{nearest(split, self.splits())} (there: {', '.join(self.splits()) or 'none'})"
            )
        return found

    def open(self, split: str) -> None:
        """Notes that a split is read, by a hash of what is in its files."""
        content = [[shard.name, shard.sha256] for shard in self.of(split)]
        digest = hashlib.sha256(json.dumps([split, content]).encode()).hexdigest()
        for each in _OPENED:
            each[digest] = f"{from_here(self.folder)} ({split})"

    def records(self, shard: Shard) -> Path:
        """Returns where a file is."""
        return self.folder / f"{shard.name}.tfrecord"

    def index(self, shard: Shard) -> Path:
        """Returns where a file's index is."""
        return self.folder / f"{shard.name}.index"

    def fits(self, shard: Shard) -> str | None:
        """Says what of a file is not as it was written, by its size; None if nothing."""
        for path, size in (
            (self.records(shard), shard.bytes),
            (self.index(shard), 16 * shard.examples),
        ):
            try:
                found = path.stat().st_size
            except OSError as error:
                return f"{path.name}: {error.strerror}"
            if found != size:
                return f"{path.name} has {found} bytes, not {size}"
        return None

    def write(self) -> None:
        """Writes the manifest, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        content["totals"] = {
            split: sum(shard.examples for shard in self.of(split)) for split in self.splits()
        }
        del content["folder"]
        with written_whole(self.folder / NAME) as beside:
            beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def opened() -> Iterator[dict[str, str]]:
    """Collects what is read: hashes of the records, and what to call them in messages."""
    found: dict[str, str] = {}
    _OPENED.append(found)
    try:
        yield found
    finally:
        _OPENED.pop()


def merged(shapes: Iterable[list[int | None]]) -> list[int | None]:
    """Returns what shapes of one rank have in common."""
    return [one[0] if len(set(one)) == 1 else None for one in zip(*shapes, strict=True)]


def read(path: str | Path) -> Manifest:
    """Reads a manifest, of a complete folder or not.

    Args:
        path: the folder, or the file itself

    Raises:
        SetupError: there is none, or it is damaged, or of a later format.
    """
    file = Path(path)
    file = file if file.suffix == ".json" else file / NAME
    where = from_here(file)
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        number, _ = content.pop("format"), content.pop("totals")
        if number == FORMAT:
            content["features"] = {k: Feature(**v) for k, v in content["features"].items()}
            content["shards"] = [Shard(**shard) for shard in content["shards"]]
            manifest = Manifest(folder=file.parent, **content)
    except OSError as error:
        raise SetupError(
            f"{where}: {error.strerror}; expected the manifest that python -m ctl_core tfrecords "
            "writes."
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SetupError(
            f"{where}: is damaged, or no manifest of TFRecord files; delete it and run python -m "
            "ctl_core tfrecords again."
        ) from error
    if number != FORMAT:
        raise SetupError(
            f"{where}: has the format {shown(number)}, this engine reads {FORMAT}; update it, or "
            "write the files anew."
        )
    return manifest


def read_complete(path: str | Path) -> Manifest:
    """The same, of a folder that is complete and whose files have their sizes.

    Raises:
        SetupError: it is not, or they have not.
    """
    manifest = read(path)
    where = from_here(manifest.folder / NAME)
    again = "run the python -m ctl_core tfrecords that wrote it again, which goes on from there."
    if not manifest.complete:
        raise SetupError(
            f"{where}: only {len(manifest.shards)} of {manifest.planned} files are written; {again}"
        )
    if wrong := [why for shard in manifest.shards if (why := manifest.fits(shard))]:
        more = f", and {len(wrong) - 1} more" * (len(wrong) > 1)
        raise SetupError(f"{where}: does not fit its files: {wrong[0]}{more}; {again}")
    return manifest
