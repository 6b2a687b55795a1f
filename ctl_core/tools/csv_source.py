"""CSV files, as examples to write: a row is one. They are read row by row, however long they are.

A first pass finds the type of each column, and where each row begins; a row is read again, from
there, when it is written. What memory holds is some thirty bytes a row, and eighty while rows are
put into order.
"""

from __future__ import annotations

import array
import csv
import dataclasses
import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctl_core.data.manifest import Feature
from ctl_core.data.splits import SPLITS, hash_of
from ctl_core.errors import SetupError, one_line
from ctl_core.files import from_here
from ctl_core.settings import shown
from ctl_core.tools.record_options import Options
from ctl_core.tools.record_source import (
    Damaged,
    Example,
    Source,
    check_columns,
    file_states,
)

_BLOCK = 4096  # rows that are looked at together
_OPEN = 64  # files that are held open, at most
# As pandas has them, of a column of numbers.
_WORDS = ["nan", "NaN", "NAN", "-nan", "-NaN", "NA", "N/A", "n/a", "<NA>", "#N/A"]
_MISSING = frozenset(["", "null", "NULL", "None", *_WORDS])
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,300}\s*")
_ZEROS = re.compile(r"\s*[+-]?0[0-9]")
_NUMBER = re.compile(
    r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?\s*|\s*[+-]?inf(?:inity)?\s*",
    re.IGNORECASE,
)


@dataclasses.dataclass
class _Column:
    """What the values of a column have been so far.

    Attributes:
        name: of the column
        text: whether one is no number
        decimal: whether one is no whole number
        missing: whether one is
        zeros: whether a whole number is written with a zero in front
        least, most: of the whole numbers
        small, big: of the others' absolute values, the least but 0 and the greatest
        beyond: the rows of numbers that float64 has not
    """

    name: str
    text: bool = False
    decimal: bool = False
    missing: bool = False
    zeros: bool = False
    least: int = 0
    most: int = -1
    small: float = np.inf
    big: float = 0.0
    beyond: list[int] = dataclasses.field(default_factory=list)

    def see(self, texts: Sequence[str], first: int) -> None:
        """Looks at values.

        Args:
            texts: as they are written
            first: the row of the first one
        """
        if self.text:
            return
        given = [text for text in texts if text not in _MISSING]
        self.missing |= len(given) < len(texts)
        if all(map(_WHOLE.fullmatch, given)):
            self.zeros |= any(map(_ZEROS.match, given))
            numbers = [int(text) for text in given]
            if numbers:
                seen = [] if self.most < self.least else [self.least, self.most]
                self.least, self.most = min([*seen, *numbers]), max([*seen, *numbers])
        elif all(map(_NUMBER.fullmatch, given)):
            self.decimal = True
            values = np.array([float(text) for text in given])
            sizes = np.abs(values[np.isfinite(values) & (values != 0)])
            self.small, self.big = sizes.min(initial=self.small), sizes.max(initial=self.big)
            if np.isinf(values).any():
                self.beyond += [
                    first + row
                    for row, text in enumerate(texts)
                    if text not in _MISSING and "n" not in text.lower() and np.isinf(float(text))
                ]
        else:
            self.text = True

    def kind(self) -> tuple[str, str]:
        """Returns the type that holds the values, and why it is not the one that most expect."""
        seen = self.most >= self.least
        big = max(self.big, float(max(abs(self.least), abs(self.most)))) if seen else self.big
        if self.text or not (seen or self.decimal):
            return "string", ""
        if self.decimal or (self.missing and big < 2**53 and not self.zeros):
            if big >= 2**24 or self.small < np.finfo("float32").tiny:
                return "float64", "float32 would not hold its numbers"
            return "float32", ""
        if self.zeros:
            return "string", "its numbers have zeros in front; written without, they are int64"
        if self.least < -(2**63) or self.most >= 2**63:
            return "string", "its numbers are beyond int64"
        if self.missing:
            return "string", "some of its numbers are missing, and float64 would not hold the rest"
        return "int64", ""


_GET: dict[str, Callable[[str], Any]] = {
    "string": str.encode,
    "int64": int,
    "float32": lambda text: np.nan if text in _MISSING else float(text),
    "float64": lambda text: np.float64("nan" if text in _MISSING else text).tobytes(),
}


class _Files:
    """The files, and where the rows are in them.

    Attributes:
        header: the names of the columns, in the order of the first file
    """

    def __init__(self, files: list[tuple[Path, str]]) -> None:
        self.header: list[str] = []
        self._paths = [path for path, _ in files]
        self._commas: list[str] = []
        self._orders: list[list[int] | None] = []
        self._start, self._length = array.array("q"), array.array("I")
        self.file = array.array("H")
        self._open: dict[int, Any] = {}

    def scan(self, damaged: list[Damaged]) -> Iterator[tuple[str, list[str]]]:
        """Yields where each row is, for messages, and its fields; notes where to read it again.

        Args:
            damaged: is told of rows with more or fewer fields

        Raises:
            SetupError: a file cannot be read, is no CSV or has other columns.
        """
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
        for number, path in enumerate(self._paths):
            where, at = from_here(path), 0
            try:
                with path.open(newline="", encoding="utf-8-sig") as file:
                    first = file.readline()
                    comma = comma_of(path, first)
                    file.seek(0)

                    def texts(file: Any = file, path: Path = path) -> Iterator[str]:
                        nonlocal at
                        with path.open("rb") as raw:
                            at = 3 * (raw.read(3) == b"\xef\xbb\xbf")
                        for text in file:
                            at += len(text) if text.isascii() else len(text.encode())
                            yield text

                    lines = csv.reader(texts(), delimiter=comma, strict=True)
                    self._columns(where, next(lines, []), comma)
                    order, begin = self._orders[-1], at
                    for row in lines:
                        start, begin = begin, at
                        if not row:
                            continue
                        place = f"{where}:{lines.line_num}"
                        if len(row) != len(self.header):
                            why = f"has {len(row)} fields, expected {len(self.header)}"
                            damaged.append(Damaged(place, why))
                            continue
                        self._start.append(start)
                        self._length.append(at - start)
                        self.file.append(number)
                        yield place, row if order is None else [row[i] for i in order]
            except OSError as error:
                raise SetupError(f"{where}: cannot be read: {error.strerror}.") from error
            except UnicodeDecodeError as error:
                raise SetupError(
                    f"{where}: is not UTF-8 text (byte {error.start} of a block is "
                    f"{error.object[error.start]:#x}); convert it, by iconv for example."
                ) from error
            except csv.Error as error:
                raise SetupError(
                    f"{where}:{lines.line_num}: is no CSV: {one_line(error)}."
                ) from error

    def _columns(self, where: str, found: list[str], comma: str) -> None:
        """Notes in which order a file has the columns.

        Raises:
            SetupError: it has others than the first, or they have no names of their own.
        """
        check_header(where, found)
        self.header = header = self.header or found
        if others := sorted({*header} ^ {*found}):
            has = "has" if others[0] in found else "has not"
            raise SetupError(
                f"{where}: has other columns than {from_here(self._paths[0])}: it {has} "
                f"{shown(others[0])}."
            )
        self._commas.append(comma)
        self._orders.append(None if found == header else [found.index(name) for name in header])

    def where(self, row: int) -> str:
        """Returns where a row is, for messages."""
        return f"{from_here(self._paths[self.file[row]])}: byte {self._start[row]}"

    def row(self, row: int) -> list[str]:
        """Reads a row again.

        Raises:
            ValueError: it is another one by now.
            OSError: it cannot be read.
        """
        number = self.file[row]
        if number not in self._open:
            if len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[number] = self._paths[number].open("rb", buffering=0)
        file = self._open[number]
        file.seek(self._start[row])
        text = file.read(self._length[row]).decode()
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=self._commas[number]))
        if len(rows) != 1 or len(rows[0]) != len(self.header):
            raise ValueError("another row")
        order = self._orders[number]
        return rows[0] if order is None else [rows[0][i] for i in order]

    def again(self, rows: np.ndarray | None, column: int) -> Iterator[str]:
        """Yields what rows have in a column; None: all rows."""
        for row in range(len(self.file)) if rows is None else rows:
            yield self.row(row)[column]


def comma_of(path: Path, first: str) -> str:
    """Returns what separates the fields of a file, judging by its first line."""
    return "\t" if path.suffix.lower() == ".tsv" else max(",;\t|", key=first.count)


def check_header(where: str, found: list[str]) -> None:
    """Refuses a first line without names, or with a name twice."""
    if not found:
        raise SetupError(f"{where}: is empty; expected a line with the columns' names.")
    if twice := sorted({name for name in found if found.count(name) > 1}):
        raise SetupError(f"{where}: has the column {shown(twice[0])} twice; rename one.")
    if "" in found:
        raise SetupError(f"{where}: column {found.index('') + 1} has no name in the first line.")


def csv_source(options: Options, files: list[tuple[Path, str]]) -> Source:
    """Looks at CSV files.

    Args:
        options: of the command
        files: paths, and the split of each

    Raises:
        SetupError: one cannot be read, or there is no such column.
    """
    table, damaged = _Files(files), list[Damaged]()
    columns: list[_Column] = []
    hashes = array.array("q")
    block: list[list[str]] = []
    unlabelled: list[tuple[int, str, bool]] = []
    key = label = -1

    def look() -> None:
        for column, texts in zip(columns, zip(*block, strict=True), strict=True):
            column.see(texts, len(hashes))
        keys = [("\x1f".join(row) if key < 0 else row[key].strip()).encode() for row in block]
        hashes.frombytes(hash_of(keys).numpy().tobytes())
        block.clear()

    for number, (place, row) in enumerate(table.scan(damaged)):
        if not number:
            check_columns(options, table.header)
            columns = [_Column(name, text=name in options.drop) for name in table.header]
            key = table.header.index(options.key) if options.key else -1
            label = table.header.index(options.label) if options.label else -1
        if label >= 0 and row[label] in _MISSING:
            unlabelled.append((number, place, row[label] == ""))
        block.append(row)
        if len(block) == _BLOCK:
            look()
    if block:
        look()
    check_columns(options, table.header)
    kinds = {column.name: column.kind() for column in columns if column.name not in options.drop}
    left_out = set[int]()
    for column in columns:
        if column.name in kinds and kinds[column.name][0] != "string":
            for row_number in column.beyond:
                why = f"{column.name} is beyond what float64 holds"
                damaged.append(Damaged(table.where(row_number), why))
                left_out.add(row_number)
    if options.label:
        text = kinds and kinds[options.label][0] == "string"
        for row_number, place, empty in unlabelled:
            if empty or not text:
                damaged.append(Damaged(place, f"has no value of {options.label}"))
                left_out.add(row_number)
    rows = np.delete(np.arange(len(table.file)), sorted(left_out)) if left_out else None
    features = {
        name: Feature(kind, [], "raw" if kind == "float64" else "value")
        for name, (kind, _) in kinds.items()
    }
    get = {name: _GET[kind] for name, (kind, _) in kinds.items()}
    classes: list[str] = []
    if options.label and features and features[options.label].dtype == "string":
        classes = sorted(set(table.again(rows, label)), key=str.encode)
        numbers = {text: number for number, text in enumerate(classes)}
        features[options.label] = Feature("int64", [], "value")
        get[options.label] = numbers.__getitem__
    places = [(name, table.header.index(name), get[name]) for name in features]

    def read(indices: np.ndarray) -> Iterator[Example | Damaged]:
        for row in indices if rows is None else rows[indices]:
            try:
                fields = table.row(row)
                yield Example({name: typed(fields[at]) for name, at, typed in places}, {})
            except OSError as error:
                yield Damaged(table.where(row), f"cannot be read: {error.strerror}")
            except (ValueError, KeyError):
                yield Damaged(table.where(row), "has changed while it was read")

    codes = np.array([SPLITS.index(split) for _, split in files], "int8")
    splits = codes[np.frombuffer(table.file, "uint16")] if len(table.file) else codes[:0]
    own = np.frombuffer(hashes, "int64") if len(hashes) else np.zeros(0, "int64")
    return Source(
        features=features,
        label=options.label,
        class_names=classes,
        hashes=own if rows is None else own[rows],
        splits=splits if rows is None else splits[rows],
        bytes=sum(path.stat().st_size for path, _ in files),
        state=file_states([path for path, _ in files]),
        damaged=damaged,
        read=read,
        notes=[f"{name} is kept as {kind}: {why}." for name, (kind, why) in kinds.items() if why],
    )
