"""The pictures of a run: what ``tf.summary.image`` has written, read without TensorFlow.

TensorBoard's event files are TFRecord files: length, its checksum, the data, and theirs
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_HEAD, _FOOT = struct.Struct("<Q"), 4
_FILES = "*/events.out.tfevents.*"
# More than any event of ours has (bytes): a damaged length is not believed.
_MOST = 1 << 30


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture: the step, ``train/samples`` as its name, and the bytes of a PNG file."""

    step: int
    name: str
    png: bytes


class Pictures:
    """The pictures of a run's summaries, as they come."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is tb in the run folder."""
        self._folder = folder
        self._places: dict[Path, int] = {}

    def new(self, sizes: Mapping[str, int] | None = None) -> list[Picture]:
        """Returns those that were written since the last call, file by file.

        Args:
            sizes: of files, as ``sizes_in`` has them: only these are read, and only so far
        """
        found: list[Picture] = []
        for path in sorted(self._folder.glob(_FILES)):
            name = path.relative_to(self._folder).as_posix()
            most = None if sizes is None else sizes.get(name, 0)
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                for data in _records(file, most):
                    self._places[path] = file.tell()
                    if b"images" in data:
                        found += _pictures(path.parent.name, data)
        return found


def sizes_in(folder: Path) -> dict[str, int]:
    """Returns how many bytes each file of summaries below a run's tb has."""
    found = {}
    for path in folder.glob(_FILES):
        with contextlib.suppress(OSError):
            found[path.relative_to(folder).as_posix()] = path.stat().st_size
    return found


def _records(file: BinaryIO, most: int | None) -> Iterator[bytes]:
    """Yields the records from here on that are whole, and end before so many bytes of the file."""
    while len(head := file.read(_HEAD.size + 4)) == _HEAD.size + 4:
        (size,) = _HEAD.unpack_from(head)
        if size > _MOST:
            return
        data = file.read(size + _FOOT)
        if len(data) < size + _FOOT or (most is not None and file.tell() > most):
            return
        yield data[:size]


def _pictures(split: str, data: bytes) -> Iterator[Picture]:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    event: Any = Event()
    try:
        event.ParseFromString(data)
    except DecodeError:
        return
    for value in event.summary.value:
        if value.metadata.plugin_data.plugin_name != "images":
            continue
        several = value.tensor.string_val[2:]  # after width and height
        for number, png in enumerate(several):
            name = f"{split}/{value.tag}" + f"/{number}" * (len(several) > 1)
            yield Picture(event.step, name, png)
