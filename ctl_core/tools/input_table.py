"""Raw inputs from a CSV or Parquet file: read batch by batch, a column for each input."""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ctl_core.errors import SetupError, one_line
from ctl_core.files import from_here
from ctl_core.nested import described, input_names, structured
from ctl_core.predict import converter
from ctl_core.settings import nearest, shown
from ctl_core.tools.csv_source import check_header, comma_of
from ctl_core.tools.table_source import load_pyarrow

SUFFIXES = (".csv", ".tsv", ".parquet")
# Columns of a batch by name, arrays of a first dimension that all share; and where it is.
_Part = tuple[str, dict[str, np.ndarray]]


def read_table(path: Path, spec: Any, batch_size: int, say: Callable[[str], None]) -> Iterator[Any]:
    """Reads raw inputs from a table of any size; columns are checked at once.

    Args:
        path: a .csv, .tsv or .parquet file
        spec: the specification of the raw inputs: one of several, of a number or text an example,
            is in the column of its name; one alone may be all columns of the file, in their order
        batch_size: examples in a batch
        say: is told which columns are left out

    Returns:
        Batches as ``spec`` has them.

    Raises:
        SetupError: the file cannot be read, or does not hold what the model takes; in a row, once
            that is read.
    """
    what, parquet = f"input: {from_here(path)}", path.suffix.lower() == ".parquet"
    names, columns = input_names(spec), _columns_of_parquet(path) if parquet else _header(path)
    chosen = _chosen(what, names, columns)
    if others := [name for name in columns if name not in itertools.chain(*chosen.values())]:
        say(f"{what}: columns that the model does not take: {one_line(', '.join(others), 100)}.")
    read = _read_parquet if parquet else _read_csv
    texts = {
        column
        for name, several in chosen.items()
        for column in several
        if names[name].dtype.name == "string"
    }
    parts = read(path, batch_size, list(itertools.chain(*chosen.values())), texts)
    first = next(parts, None)
    if first is None:
        raise SetupError(f"{what} holds no examples.")

    def batch(part: _Part) -> Any:
        where, values = part
        found = {}
        for name, several in chosen.items():
            array = values[several[0]]
            if len(several) > 1:
                array = np.stack([values[column] for column in several], 1)
            elif array.ndim < (names[name].shape.rank or 0):
                array = array[:, None]
            found[name] = converter(where, name, names[name], array)(array)
        return structured(spec, found)

    return map(batch, itertools.chain([first], parts))


def _chosen(what: str, names: dict[str, Any], columns: list[str]) -> dict[str, list[str]]:
    """Returns by input the columns that it is made of.

    Raises:
        SetupError: a column is missing, or the input is of more than columns are.
    """
    chosen = {}
    for name, part in names.items():
        sizes = part.shape.as_list() if part.shape.rank else []
        if len(names) == 1 and len(sizes) == 2 and sizes[1] == len(columns):
            return {name: columns}
        if len(names) == 1 and name not in columns and len(columns) == 1:
            return {name: columns}
        if name not in columns:
            several = f" of {sizes[1]} columns" if len(names) == 1 and len(sizes) == 2 else ""
            raise SetupError(
                f"{what}: the model takes {name}, {described(part)}; expected a column of that "
                f"name{', or a table' * bool(several)}{several}{nearest(name, columns)} (there: "
                f"{one_line(', '.join(columns), 100)})."
            )
        chosen[name] = [name]
    return chosen


# ---- CSV ----------------------------------------------------------------------------------------


def _header(path: Path) -> list[str]:
    where = from_here(path)
    _, header = next(_lines(path), (0, []))
    check_header(where, header)
    return header


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows of a CSV file, the header first, with the numbers of their lines."""
    where = from_here(path)
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            lines = csv.reader(file, delimiter=comma_of(path, first), strict=True)
            for row in lines:
                if row:
                    yield lines.line_num, row
    except OSError as error:
        raise SetupError(f"input: {where} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SetupError(f"input: {where} is not UTF-8 text; convert it.") from error
    except csv.Error as error:
        raise SetupError(f"input: {where}:{lines.line_num}: {one_line(error)}.") from error


def _read_csv(path: Path, size: int, columns: list[str], texts: set[str]) -> Iterator[_Part]:
    lines = _lines(path)
    _, header = next(lines)
    places = {name: header.index(name) for name in columns}
    while several := list(itertools.islice(lines, size)):
        for number, row in several:
            if len(row) != len(header):
                raise SetupError(
                    f"input: {from_here(path)}:{number}: has {len(row)} fields, expected "
                    f"{len(header)}, as the first line."
                )
        values: dict[str, np.ndarray] = {}
        for name, place in places.items():
            found = [(number, row[place]) for number, row in several]
            values[name] = (
                np.array([text for _, text in found], object)
                if name in texts
                else _numbers(path, name, found)
            )
        yield f"input: {from_here(path)}:{several[0][0]}", values


def _numbers(path: Path, name: str, found: list[tuple[int, str]]) -> np.ndarray:
    """Makes whole numbers of texts if all are; otherwise others, of which an empty one is NaN."""
    for number, text in found:
        try:
            float(text.replace("_", "?") or "nan")  # Python would take 1_000
        except ValueError:
            raise SetupError(
                f"input: {from_here(path)}:{number}: {name}: expected a number, got "
                f"{shown(text, 40)}."
            ) from None
    texts = [text or "nan" for _, text in found]
    try:
        return np.array([int(text) for text in texts], "int64")
    except (ValueError, OverflowError):
        return np.array([float(text) for text in texts])


# ---- Parquet ------------------------------------------------------------------------------------


def _open_parquet(path: Path) -> Any:
    pa, pq = load_pyarrow()
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise SetupError(
            f"input: {from_here(path)} cannot be read as a Parquet file: {one_line(error, 160)}"
        ) from error


def _columns_of_parquet(path: Path) -> list[str]:
    with _open_parquet(path) as file:
        return list(file.schema_arrow.names)


def _read_parquet(path: Path, size: int, columns: list[str], _: set[str]) -> Iterator[_Part]:
    pa, _pq = load_pyarrow()
    row = 0
    with _open_parquet(path) as file:
        try:
            for batch in file.iter_batches(size, columns=columns):
                where = f"input: {from_here(path)}: row {row}"
                row += len(batch)
                yield where, {name: _array(pa, batch.column(name)) for name in columns}
        except (OSError, pa.ArrowException) as error:
            raise SetupError(
                f"input: {from_here(path)}: is damaged: {one_line(error, 160)}"
            ) from error


def _array(pa: Any, column: Any) -> np.ndarray:
    """Returns a column as an array; one of lists that are as long has a dimension more."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if pa.types.is_boolean(column.type) and not column.null_count:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    values = column.to_pylist()
    try:
        array = np.array(values)
    except ValueError:  # lists that are not as long
        array = np.empty(len(values), object)
        array[:] = values
    return array if array.dtype.kind in "iufb" else np.array([v or "" for v in values], object)
