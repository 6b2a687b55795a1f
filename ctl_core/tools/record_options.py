"""The options of ``ctl_core tfrecords``, read without TensorFlow: mistakes are answered at once."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ctl_core.errors import SetupError, one_line
from ctl_core.settings import check_path, nearest, shown

TABLES = (".csv", ".tsv", ".parquet", ".npz")
_SOURCE = """\
what to read: a folder of images with a folder for each class (photos/cat/1.jpg); a .csv, .tsv,
.parquet or .npz file, or a folder of such files of one kind. Folders, files or arrays called train,
validation and test (x_train, ...) are splits"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to write of what.

    Attributes:
        source: a folder or file
        output: the folder to write
        label: the feature to predict
        key: the column that an example is told from others by
        drop: columns that are left out
        validation: how much of the training examples goes to that split
        test: the same
        shard_size: examples in a file; None: as fits
        shards: how many files a split is written to; None: as fits
        skip: whether damaged input is left out
        overwrite: whether what a complete manifest describes may be replaced
        debug: full tracebacks
        verify: the folder of files to look at, and nothing is written; the rest is None
    """

    source: Path
    output: Path
    label: str | None
    key: str | None
    drop: tuple[str, ...]
    validation: float
    test: float
    shard_size: int | None
    shards: int | None
    skip: bool
    overwrite: bool
    debug: bool
    verify: Path | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says in one line of ours what is wrong."""
        raise SetupError(f"tfrecords: {one_line(message)}; --help shows what it takes.")


def parse(argv: Sequence[str]) -> Options:
    """Parses what stands behind ``tfrecords``.

    Raises:
        SetupError: anything is unknown, missing, of the wrong type or out of range.
        SystemExit: ``--help`` was asked for and printed.
    """
    parser = _Parser(
        prog="python -m ctl_core tfrecords",
        description="Write images or tables as TFRecord files with a manifest, for "
        "ctl_core.data.read_tfrecords. Run again after a kill, it goes on.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, nargs="?", help=one_line(_SOURCE))
    add("--output", type=Path, metavar="FOLDER", help="the folder to write")
    add(
        "--verify",
        type=Path,
        metavar="FOLDER",
        help="write nothing: read what was written to a folder, and compare it with its manifest",
    )
    add("--label", metavar="NAME", help="column to predict; of text, classes get numbers")
    add(
        "--key",
        metavar="NAME",
        help="column by whose hash examples are put into splits: those that share a value, such as "
        "a patient's, stay together (default: the file's name, or all values of a row)",
    )
    add(
        "--drop", metavar="NAME", action="append", default=[], help="leave a column out; repeatable"
    )
    part = "of the training examples, by a hash of the key, from 0 up to below 1 (default: 0)"
    for split in ("validation", "test"):
        add(f"--{split}", type=float, metavar="X", default=0.0, help=f"how much {part}")
    size = "(default: files of about 32 MB, and up to 8 of them for 1,000 examples each)"
    add("--shard-size", type=int, metavar="N", help=f"examples in a file {size}")
    add("--shards", type=int, metavar="N", help="files of a split, instead of --shard-size")
    add(
        "--on-error",
        choices=["refuse", "skip"],
        default="refuse",
        help="what to do about damaged input: stop at the first, or leave it out and name it in "
        "the output and the manifest (default: refuse)",
    )
    add("--overwrite", action="store_true", help="replace what was written of other data")
    add("--debug", action="store_true", help="full tracebacks")
    known, others = parser.parse_known_args(argv)
    if others:
        flags = [f"--{name.replace('_', '-')}" for name in vars(known)]
        flag = others[0].partition("=")[0]
        raise SetupError(f"tfrecords: unknown option {shown(others[0])}{nearest(flag, flags)}")
    if known.verify is not None:
        given = [word for word in argv if word != "--debug"]
        if len(given) != 1 + (given[0] == "--verify"):
            raise SetupError("verify: takes the folder and no other option but --debug.")
        nothing: dict[str, Any] = dict.fromkeys(f.name for f in dataclasses.fields(Options))
        return Options(**nothing | {"debug": known.debug, "verify": known.verify})
    for name, word in (("source", "SOURCE"), ("output", "--output")):
        if getattr(known, name) is None:
            raise SetupError(f"tfrecords: {word} is missing; --help shows what it takes.")
    if not (known.validation >= 0 and known.test >= 0 and known.validation + known.test < 1):
        raise SetupError(
            "validation and test: expected numbers from 0 up that leave some for train, got "
            f"{known.validation} and {known.test}."
        )
    for name in ("shard_size", "shards"):
        if (number := getattr(known, name)) is not None and number < 1:
            raise SetupError(f"{name}: expected a whole number from 1 up, got {number}.")
    if known.shards and known.shard_size:
        raise SetupError("shards and shard_size: give one of the two.")
    for name in ("source", "output"):
        try:
            check_path(str(getattr(known, name)))
        except ValueError as error:
            why = str(error) or f"is no path: {shown(str(getattr(known, name)))}."
            raise SetupError(f"{name}: {why}") from error
    if not known.source.exists():
        raise SetupError(f"{one_line(known.source)}: there is no such file or folder.")
    return Options(
        known.source,
        known.output,
        known.label,
        known.key,
        tuple(known.drop),
        known.validation,
        known.test,
        known.shard_size,
        known.shards,
        known.on_error == "skip",
        known.overwrite,
        known.debug,
    )
