"""Tables, as examples to write: a row is one. NPZ files are held in memory."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.data.manifest import Feature
from ctl_core.data.splits import SPLITS, hash_of
from ctl_core.errors import SetupError, one_line, op_message
from ctl_core.files import from_here
from ctl_core.settings import label as label_of
from ctl_core.settings import shown
from ctl_core.tools.csv_source import csv_source
from ctl_core.tools.record_options import Options
from ctl_core.tools.record_source import (
    Damaged,
    Example,
    Source,
    check_columns,
    file_states,
    split_named,
)


@dataclasses.dataclass
class _Table:
    """Rows of one or several files.

    Attributes:
        columns: numbers and texts as arrays of first dimension ``len(where)``; lists otherwise
        images: the names of columns of image files
        splits: of each row
        where: of each row, for messages
        dropped: columns that are left out
        damaged: rows that are left out
    """

    columns: dict[str, Any]
    splits: list[str]
    where: list[str]
    images: set[str] = dataclasses.field(default_factory=set)
    dropped: set[str] = dataclasses.field(default_factory=set)
    damaged: list[Damaged] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Other:
    """A column of a type that cannot be written; refused unless it is dropped."""

    kind: str


def table_source(options: Options, paths: list[Path]) -> Source:
    """Reads tables of one kind.

    Raises:
        SetupError: one cannot be read, or holds what TFRecord files cannot; there is no such
            column; or a package that is needed is missing.
    """
    named = [split_named(re.split(r"[-_.]", path.stem)[0]) for path in paths]
    splits = named if len(paths) > 1 and all(named) else ["train"] * len(paths)
    files = list(zip(paths, splits, strict=True))
    reader = {".npz": _read_npz, ".parquet": _read_parquet}.get(paths[0].suffix.lower())
    if reader is None:
        return csv_source(options, files)
    table = reader(files, set(options.drop))
    check_columns(options, [*table.columns, *table.dropped])
    features, getters = {}, {}
    for name, column in table.columns.items():
        if name in table.images:
            features[name] = Feature("uint8", [None, None, None], "image")
            getters[name] = column.__getitem__
        else:
            features[name], getters[name] = _encoded(name, column, options.source)
    keys = _keys(table, options, features, getters)
    classes: list[str] = []
    rows = list(range(len(table.where)))
    if options.label in features:
        assert options.label
        rows = [row for row in rows if not _missing(getters[options.label](row))]
        table.damaged += [
            Damaged(table.where[row], f"has no value of {options.label}")
            for row in sorted(set(range(len(table.where))) - set(rows))
        ]
        if features[options.label] == Feature("string", [], "value"):
            texts = getters[options.label]
            found = sorted({texts(row) for row in rows})
            numbers = {text: number for number, text in enumerate(found)}
            classes = [text.decode(errors="replace") for text in found]
            features[options.label] = Feature("int64", [], "value")
            getters[options.label] = lambda row: numbers[texts(row)]

    def read(indices: np.ndarray) -> Iterator[Example | Damaged]:
        for index in indices:
            row = rows[index]
            values = {name: get(row) for name, get in getters.items()}
            shapes = {}
            try:
                for name in table.images:
                    image = tf.io.decode_image(values[name], expand_animations=False)
                    shapes[name] = image.shape.as_list()
            except tf.errors.OpError as error:
                yield Damaged(table.where[row], f"{name}: {op_message(error, 100)}")
                continue
            yield Example(values, shapes)

    return Source(
        features=features,
        label=options.label,
        class_names=classes,
        hashes=hash_of([keys[row] for row in rows]).numpy(),
        splits=np.array([SPLITS.index(table.splits[row]) for row in rows], "int8"),
        bytes=_size(features, getters, rows),
        state=file_states(paths),
        damaged=table.damaged,
        read=read,
    )


def _missing(value: Any) -> bool:
    return value == b"" or (isinstance(value, float) and value != value)


def _size(features: dict[str, Feature], getters: dict[str, Any], rows: list[int]) -> int:
    """Returns about how many bytes the examples take, judging by some."""
    some = rows[:: max(1, len(rows) // 100)]
    found = 0
    for name, get in getters.items():
        for row in some:
            value = get(row)
            found += (
                len(value) * (8 if features[name].encoding == "ragged" else 1)
                if isinstance(value, bytes | list)
                else 8
            )
    return found * len(rows) // max(1, len(some))


def _keys(
    table: _Table, options: Options, features: dict[str, Feature], getters: dict[str, Any]
) -> list[bytes]:
    if options.key:
        column, name = table.columns.get(options.key), options.key
        if column is None or name in table.images or features[name].encoding == "ragged":
            raise SetupError(f"key: {name} is no column of numbers or texts.")
        if getattr(column, "ndim", 1) > 1:
            raise SetupError(f"key: {name} holds arrays; expected a number or text a row.")
        return [v if isinstance(v, bytes) else str(v).encode() for v in _plain(column)]
    keys = []
    for row in range(len(table.where)):
        digest = hashlib.sha256()
        for name, get in getters.items():
            value = get(row)
            digest.update(f"{name}\0".encode())
            digest.update(value if isinstance(value, bytes) else repr(value).encode())
        keys.append(digest.digest())
    return keys


def _plain(column: Any) -> list[Any]:
    values = column.tolist() if isinstance(column, np.ndarray) else column
    return [value.encode() if isinstance(value, str) else value for value in values]


def _encoded(name: str, column: Any, source: Path) -> tuple[Feature, Callable[[int], Any]]:
    """Says how a column is written, and returns what gives its values by row.

    Raises:
        SetupError: it cannot be.
    """
    if isinstance(column, list):
        if all(isinstance(value, bytes) for value in column):
            return Feature("string", [], "value"), column.__getitem__
        kinds = {np.asarray(value).dtype.kind for value in column if len(value)}
        if kinds <= set("iub"):
            return Feature("int64", [None], "ragged"), lambda row: [int(v) for v in column[row]]
        if kinds <= set("iubf"):
            return Feature("float32", [None], "ragged"), lambda row: [float(v) for v in column[row]]
        if kinds <= set("USO"):
            return Feature("string", [None], "ragged"), lambda row: [
                v if isinstance(v, bytes) else str(v).encode() for v in column[row]
            ]
    elif not isinstance(column, _Other):
        kind, dtype = column.dtype.kind, column.dtype
        if kind in "US" and column.ndim == 1:
            texts = _plain(column)
            return Feature("string", [], "value"), texts.__getitem__
        if kind in "iu" and (column.size == 0 or int(column.max()) < 2**63):
            if column.ndim == 1:
                return Feature("int64", [], "value"), lambda row: int(column[row])
            if kind == "u" and dtype.itemsize > 2:  # TensorFlow does not decode those
                column = column.astype("int64")
        if dtype == np.float32 and column.ndim == 1:
            return Feature("float32", [], "value"), lambda row: float(column[row])
        if column.dtype.kind in "iufbc" and column.dtype.itemsize <= 16:
            column = np.ascontiguousarray(column.astype(column.dtype.newbyteorder("<"), copy=False))
            if column.dtype.name not in ("uint32", "uint64", "longdouble", "float128"):
                feature = Feature(column.dtype.name, list(column.shape[1:]), "raw")
                return feature, lambda row: column[row].tobytes()
    kind = column.kind if isinstance(column, _Other) else getattr(column, "dtype", "mixed")
    raise SetupError(
        f"{from_here(source)}: {shown(name)} is of the type {kind}, expected numbers, texts, or "
        f"lists of them; convert it, or leave it out by --drop {label_of(name)}."
    )


# ---- NPZ ----------------------------------------------------------------------------------------


def _read_npz(files: list[tuple[Path, str]], drop: set[str]) -> _Table:
    parts: list[tuple[str, str, dict[str, np.ndarray]]] = []
    dropped: set[str] = set()
    for path, split in files:
        where = from_here(path)
        arrays: dict[str, np.ndarray] = {}
        try:
            if not zipfile.is_zipfile(path):
                raise zipfile.BadZipFile("its end is missing, or something else")
            with np.load(path) as content:
                for name in content.files:
                    if left_out := drop & {name, (_split_in(name) or ("", name))[1]}:
                        dropped |= left_out
                    else:
                        arrays[name] = content[name]
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            if "allow_pickle" in str(error):
                raise SetupError(
                    f"{where}: holds Python objects, expected arrays of numbers or texts."
                ) from error
            raise SetupError(f"{where}: is damaged, or no .npz file: {one_line(error)}.") from error
        if not arrays:
            raise SetupError(f"{where}: holds no array.")
        by_split = {name: _split_in(name) for name in arrays}
        if all(by_split.values()):
            for each in dict.fromkeys(found[0] for found in by_split.values() if found):
                part = {
                    found[1]: arrays[n]
                    for n, found in by_split.items()
                    if found and found[0] == each
                }
                parts.append((each, where, part))
        else:
            parts.append((split, where, arrays))
    table = _Table({}, [], [], dropped=dropped)
    names = list(parts[0][2])
    for split, where, part in parts:
        if sorted(part) != sorted(names):
            raise SetupError(
                f"{where}: the arrays of {split} are {', '.join(sorted(part))}, expected "
                f"{', '.join(sorted(names))}."
            )
        lengths = {name: (array.shape or (None,))[0] for name, array in part.items()}
        if None in lengths.values() or len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} {list(array.shape)}" for name, array in part.items())
            raise SetupError(
                f"{where}: the arrays have to have one row for each example; got {said}."
            )
        count = lengths[names[0]]
        assert count is not None
        table.splits += [split] * count
        table.where += [f"{where}: row {row} of {split}" for row in range(count)]
    for name in names:
        arrays_of = [part[name] for _, _, part in parts]
        if len({(array.dtype, array.shape[1:]) for array in arrays_of}) > 1:
            raise SetupError(
                f"{parts[0][1]}: {shown(name)} has not the same type and shape everywhere."
            )
        table.columns[name] = np.concatenate(arrays_of) if len(arrays_of) > 1 else arrays_of[0]
    return table


def _split_in(name: str) -> tuple[str, str] | None:
    """Takes apart names such as x_train and train_images: (split, what is left)."""
    before, _, after = name.rpartition("_")
    if before and (split := split_named(after)):
        return split, before
    before, _, after = name.partition("_")
    return (split, after) if after and (split := split_named(before)) else None


# ---- Parquet ------------------------------------------------------------------------------------


def _read_parquet(files: list[tuple[Path, str]], drop: set[str]) -> _Table:
    pa, pq = load_pyarrow()
    table, parts = _Table({}, [], []), []
    for path, split in files:
        try:
            parts.append(pq.read_table(path))
        except (OSError, pa.ArrowException) as error:
            raise SetupError(
                f"{from_here(path)}: is damaged, or no Parquet file: {one_line(error, 160)}"
            ) from error
        table.splits += [split] * len(parts[-1])
        table.where += [f"{from_here(path)}: row {row}" for row in range(len(parts[-1]))]
    try:
        whole = pa.concat_tables(parts)
    except pa.ArrowException as error:
        raise SetupError(
            f"{from_here(files[0][0].parent)}: the files have different columns: "
            f"{one_line(error, 160)}"
        ) from error
    table.dropped = drop & set(whole.column_names)
    for name in whole.column_names:
        if name in drop:
            continue
        column = whole.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            table.columns[name] = [
                (value or {}).get("bytes") or b"" for value in column.to_pylist()
            ]
            table.images.add(name)
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or _whole_bool(pa, column):
            table.columns[name] = column.to_numpy()
        elif any(map(lambda is_so: is_so(kind), _texts(pa))):
            values = column.to_pylist()
            table.columns[name] = [v.encode() if isinstance(v, str) else v or b"" for v in values]
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or _fixed(pa, kind):
            table.columns[name] = _lists(column.to_pylist())
        else:
            table.columns[name] = _Other(str(kind))
    return table


def load_pyarrow() -> tuple[Any, Any]:
    """Imports pyarrow, without the thread of its allocator: beside TensorFlow it crashes at times.

    Raises:
        SetupError: it is not installed.
    """
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise SetupError(
            "Parquet files need pyarrow, which is not installed; in the project's folder: "
            f"{sys.executable} -m pip install --editable '.[parquet]'"
        ) from error
    return pa, pq


def _texts(pa: Any) -> list[Callable[[Any], bool]]:
    types = pa.types
    return [types.is_string, types.is_large_string, types.is_binary, types.is_large_binary]


def _whole_bool(pa: Any, column: Any) -> bool:
    return bool(pa.types.is_boolean(column.type)) and not column.null_count


def _fixed(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))


def _lists(values: list[Any]) -> Any:
    """Makes an array of lists if all are as long, and hold numbers."""
    values = [value or [] for value in values]
    if len({len(value) for value in values}) == 1 and len(values[0]):
        try:
            array = np.array(values)
        except ValueError:
            return values
        if array.dtype.kind in "iufb":
            return array
    return values
