"""Arrays that come batch by batch, written to a .npz file without ever being in memory at once.

They are kept in temporary files, which have no name, until their shapes are known: outputs of
different sizes are padded to the largest.
"""

from __future__ import annotations

import dataclasses
import io
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ctl_core.errors import RunError
from ctl_core.numerics.joining import on_host, varying_axes


@dataclasses.dataclass
class _Array:
    """What has come of one array: the file with its numbers, and of each batch dtype and shape."""

    file: BinaryIO
    batches: list[tuple[np.dtype[Any], tuple[int, ...]]] = dataclasses.field(default_factory=list)
    lengths: dict[int, list[np.ndarray]] = dataclasses.field(default_factory=dict)


class ArraysOnDisk:
    """Arrays by name, which grow along the first dimension.

    Holds as much memory as a batch, and the sizes of what varies.
    """

    def __init__(self, folder: Path) -> None:
        """``folder`` is where temporary files are; they need as much room as the arrays."""
        self._folder = folder
        self._arrays: dict[str, _Array] = {}

    def add(self, name: str, value: Any) -> None:
        """Adds the next batch of an array: an eager tensor, dense, ragged or sparse.

        Raises:
            RunError: it has another number of dimensions than those before.
            OSError: the disk is full.
        """
        self.add_array(name, *on_host(value))

    def add_array(self, name: str, array: np.ndarray, sizes: Mapping[int, np.ndarray]) -> None:
        """The same for what ``on_host`` has made of a tensor.

        Raises:
            As ``add``.
        """
        if name not in self._arrays:
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  closed with this object
            self._arrays[name] = _Array(file)
        known = self._arrays[name]
        if known.batches and array.ndim != len(known.batches[0][1]):
            shapes = sorted({known.batches[0][1], array.shape})
            several = " and ".join(str(list(shape)) for shape in shapes)
            raise RunError(
                f"predict: the output '{name}' has shapes {several}; one file needs one rank."
            )
        known.batches.append((array.dtype, array.shape))
        for axis, lengths in sizes.items():
            known.lengths.setdefault(axis, []).append(lengths)
        known.file.write(np.ascontiguousarray(array).tobytes())

    def write(self, path: Path) -> dict[str, list[int]]:
        """Writes the arrays to a compressed .npz file.

        An array of different sizes along an axis is padded with zeros to the largest, and
        ``NAME.lengths`` (of axis 1; ``NAME.lengths_2`` of axis 2) says how much of each example is
        its own.

        Returns:
            The shapes by name.

        Raises:
            OSError: it cannot be written.
        """
        shapes: dict[str, list[int]] = {}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, allowZip64=True) as whole:
            for name, array in self._arrays.items():
                shape, kind = _whole(array)
                with whole.open(f"{name}.npy", "w", force_zip64=True) as member:
                    member.write(_header(shape, kind))
                    for part in _parts(array):
                        member.write(_padded(part, shape, kind).tobytes())
                shapes[name] = list(shape)
                for axis, lengths in _lengths(array).items():
                    inner = f"{name}.lengths" + (f"_{axis}" if axis > 1 else "")
                    with whole.open(f"{inner}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, lengths, allow_pickle=False)
                    shapes[inner] = list(lengths.shape)
        return shapes

    def close(self) -> None:
        """Lets go of the temporary files."""
        for array in self._arrays.values():
            array.file.close()

    def __enter__(self) -> ArraysOnDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole(array: _Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns shape and dtype of all of an array."""
    kind = np.result_type(*{dtype for dtype, _ in array.batches})  # texts differ in length
    shapes = [shape for _, shape in array.batches]
    if not shapes[0]:  # a number for each batch
        return (len(shapes),), kind
    largest = (max(sizes) for sizes in zip(*(shape[1:] for shape in shapes), strict=True))
    return (sum(shape[0] for shape in shapes), *largest), kind


def _parts(array: _Array) -> Iterator[np.ndarray]:
    """Yields the batches again."""
    array.file.seek(0)
    for dtype, shape in array.batches:
        content = array.file.read(dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        part = np.frombuffer(content, dtype) if dtype.itemsize else np.zeros(shape, dtype)
        yield part.reshape(shape)


def _padded(part: np.ndarray, shape: tuple[int, ...], kind: np.dtype[Any]) -> np.ndarray:
    if part.ndim == 0 or part.shape[1:] == shape[1:]:
        return np.ascontiguousarray(part, kind)
    padded = np.zeros((len(part), *shape[1:]), kind)
    padded[tuple(map(slice, part.shape))] = part
    return padded


def _lengths(array: _Array) -> dict[int, np.ndarray]:
    """Returns how much of each example is its own along the axes in which sizes differ."""
    found = dict(array.lengths)
    shapes = [shape for _, shape in array.batches]
    for axis in varying_axes(shapes) if shapes[0] else ():
        found.setdefault(axis, [np.full(shape[0], shape[axis]) for shape in shapes])
    return {axis: _joined(parts) for axis, parts in found.items()}


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Joins sizes by example; those of an inner axis are themselves of different numbers."""
    largest = np.max([part.shape[1:] for part in parts], axis=0)
    shape = (sum(map(len, parts)), *map(int, largest))
    kind = np.result_type(*parts)
    return np.concatenate([_padded(part, shape, kind) for part in parts])


def _header(shape: tuple[int, ...], kind: np.dtype[Any]) -> bytes:
    """Returns what a .npy file of this array begins with."""
    text = io.BytesIO()
    description = {
        "descr": np.lib.format.dtype_to_descr(kind),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(text, description)
    return text.getvalue()
