"""``ctl_core tfrecords``: images or tables as TFRecord files, with a manifest of what is in them.

What is written where follows from the source and the options alone. Each file is written beside and
renamed, and the manifest is renewed after it: killed at any moment and run again, the command goes
on after the last file, and ends with the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ctl_core.console import Console
from ctl_core.data.manifest import FRAME, NAME, Manifest, Shard, merged, read
from ctl_core.data.splits import SPLITS, split_of_hash
from ctl_core.errors import RunError, SetupError, one_line, reason
from ctl_core.files import from_here, written_whole
from ctl_core.tools.image_source import image_source
from ctl_core.tools.record_options import TABLES, Options
from ctl_core.tools.record_source import Damaged, Source
from ctl_core.tools.table_source import table_source

_SHARD = 32 * 2**20  # bytes, about, unless told otherwise
_FEWEST, _FEW = 1000, 8  # examples for each of the first files
# Between two writings of the manifest, two lines of progress (seconds).
_MANIFEST_EVERY, _SAY_EVERY = 1.0, 10.0


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A file to write: its name, its split, and which examples go there, in that order."""

    name: str
    split: str
    indices: np.ndarray


def write_records(options: Options, console: Console | None = None) -> Manifest:
    """Writes the files of a source, or those that are missing.

    Raises:
        SetupError: the source is none, or there is something else where they are to be written.
        RunError: an example is damaged, unless those are left out; or a file cannot be written.
    """
    console = console or Console()
    with _held(options.output):
        return _write_all(options, console)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Holds a folder until the command or its process ends; one that stays empty goes again.

    Raises:
        SetupError: another process writes to it.
    """
    created, held = not folder.exists(), -1
    with contextlib.suppress(OSError):  # what cannot be made is said when it is written to
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None and held >= 0:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SetupError(
                    f"output: another process writes to {from_here(folder)}; wait for it, or name "
                    "another folder."
                ) from None
            except OSError:  # a file system without locks
                pass
        yield
    finally:
        if held >= 0:
            os.close(held)
        if created:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _write_all(options: Options, console: Console) -> Manifest:
    source = _source(options)
    if not len(source.hashes):
        raise SetupError(f"{from_here(options.source)}: holds no example.")
    hashes = source.hashes
    planned = _plan(source, options)
    manifest = _begin(source, options, planned, console)
    for note in source.notes:
        console.say(note)
    for damaged in source.damaged:
        _take_out(damaged, options, console)
    todo = [one for one in planned if one.name not in {shard.name for shard in manifest.shards}]
    if not todo and manifest.complete:
        console.say(f"{from_here(options.output)}: is complete already: {_summary(manifest)}.")
        return manifest
    if manifest.shards:
        console.say(f"going on after {len(manifest.shards)} of {_files(len(planned))}.")
    order = {one.name: number for number, one in enumerate(planned)}
    written_at = 0.0
    with _progress(console, sum(len(one.indices) for one in todo)) as advance:
        for number, one in enumerate(todo):
            shard = _write(one, source, options, hashes, manifest, console)
            shards = sorted([*manifest.shards, shard], key=lambda each: order[each.name])
            complete = number == len(todo) - 1
            manifest = dataclasses.replace(manifest, shards=shards, complete=complete)
            advance(len(one.indices))
            if complete and not any(each.examples for each in shards):
                raise RunError(f"{from_here(options.source)}: every example is damaged.")
            if complete or time.monotonic() - written_at > _MANIFEST_EVERY:
                with _said(manifest, Path(options.output / NAME)):
                    manifest.write()
                written_at = time.monotonic()
    console.say(f"wrote {from_here(options.output)}: {_summary(manifest)}.")
    return manifest


def _source(options: Options) -> Source:
    path = options.source
    if path.is_file():
        if path.suffix.lower() not in TABLES:
            raise SetupError(
                f"{from_here(path)}: expected a folder of images, or a file that ends with "
                f"{', '.join(TABLES)}."
            )
        return table_source(options, [path])
    files = sorted(p for p in path.iterdir() if p.is_file() and p.suffix.lower() in TABLES)
    if not files:
        return image_source(options)
    kinds = {file.suffix.lower() for file in files}
    if len(kinds) > 1:
        raise SetupError(
            f"{from_here(path)}: holds tables of several kinds ({', '.join(sorted(kinds))}); name "
            "one file, or move them to folders of their own."
        )
    return table_source(options, files)


def _plan(source: Source, options: Options) -> list[_Planned]:
    """Puts examples into splits, and these, in the order of their hashes, into files."""
    splits, hashes = source.splits, source.hashes
    fractions = {name: getattr(options, name) for name in ("validation", "test")}
    for name, fraction in fractions.items():
        if fraction and (splits == SPLITS.index(name)).any():
            raise SetupError(f"{name}: the source has a split of that name already; leave it out.")
    if any(fractions.values()):
        splits = np.where(splits == 0, split_of_hash(hashes, fractions).numpy(), splits)
    planned = []
    mean = source.bytes / len(hashes) + 100
    for place, split in enumerate(SPLITS):
        (indices,) = np.nonzero(splits == place)
        if not len(indices):
            continue
        indices = indices[np.argsort(hashes[indices], kind="stable")]
        count = options.shards or max(
            -(-len(indices) * mean // _SHARD), min(_FEW, -(-len(indices) // _FEWEST))
        )
        if options.shard_size:
            count = -(-len(indices) // options.shard_size)
        for number, part in enumerate(np.array_split(indices, min(int(count), len(indices)))):
            planned.append(_Planned(f"{split}-{number:05}", split, part))
    return planned


def _begin(source: Source, options: Options, planned: list[_Planned], console: Console) -> Manifest:
    """Returns the manifest so far: that of an earlier run with the same plan, or an empty one.

    Raises:
        SetupError: something else is there.
    """
    folder, where = options.output, from_here(options.output)
    decided: list[Any] = [source.state, options.label, options.key, sorted(options.drop)]
    decided += [options.validation, options.test, [len(one.indices) for one in planned]]
    features = {name: dataclasses.asdict(feature) for name, feature in source.features.items()}
    plan = hashlib.sha256(json.dumps([decided, features]).encode()).hexdigest()
    empty = Manifest(
        folder,
        complete=False,
        planned=len(planned),
        source=str(options.source),
        plan=plan,
        label=source.label,
        class_names=source.class_names,
        features=source.features,
        shards=[],
        skipped=[[damaged.where, damaged.why] for damaged in source.damaged],
    )
    if folder.is_dir() and (folder / NAME).exists():
        before = read(folder)
        if before.plan == plan:
            there = [shard for shard in before.shards if before.fits(shard) is None]
            complete = before.complete and len(there) == before.planned
            return dataclasses.replace(empty, shards=there, complete=complete)
        if before.complete and not options.overwrite:
            raise SetupError(
                f"{where}: holds files of other data or options, or the source has changed; "
                "--overwrite replaces them, or name another --output."
            )
        console.say(f"{where}: what is there is of other data or options; it is written anew.")
        with _said(empty, folder):
            (folder / NAME).unlink()
            for shard in before.shards:
                before.records(shard).unlink(missing_ok=True)
                before.index(shard).unlink(missing_ok=True)
    elif folder.exists():
        ours = {f"{one.name}{end}" for one in planned for end in (".tfrecord", ".index")}
        names = {p.name.removesuffix(".tmp") for p in folder.iterdir()} if folder.is_dir() else {""}
        if others := sorted(names - ours - {NAME}):
            raise SetupError(
                f"output: {where} holds other files{f' ({others[0]})' * bool(others[0])}; name a "
                "folder that is empty or not there."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty.write()
    except OSError as error:
        raise SetupError(
            f"output: {where} cannot be written: {reason(error)}; name another folder."
        ) from error
    return empty


def _write(
    planned: _Planned,
    source: Source,
    options: Options,
    hashes: np.ndarray,
    manifest: Manifest,
    console: Console,
) -> Shard:
    """Writes one file and its index."""
    path = options.output / f"{planned.name}.tfrecord"
    index: list[int] = []
    kept: list[int] = []
    skipped: list[list[str]] = []
    shapes: dict[str, list[list[int | None]]] = {
        name: [] for name, feature in source.features.items() if feature.encoding == "image"
    }
    example = tf.train.Example()
    fields: list[tuple[str, Any, bool]] = []
    for name, feature in source.features.items():
        entry = example.features.feature[name]
        kind = {"int64": "int64_list", "float32": "float_list"}.get(feature.dtype, "bytes_list")
        kind = "bytes_list" if feature.encoding in ("raw", "image") else kind
        values = getattr(entry, kind).value
        several = feature.encoding == "ragged"
        if not several:
            values.append(b"" if kind == "bytes_list" else 0)
        fields.append((name, values, several))
    begin = 0
    with _said(manifest, path), written_whole(path) as beside:
        with tf.io.TFRecordWriter(str(beside)) as writer:
            for place, found in zip(planned.indices, source.read(planned.indices), strict=True):
                if isinstance(found, Damaged):
                    _take_out(found, options, console)
                    skipped.append([found.where, found.why])
                    continue
                for name, values, several in fields:
                    if several:
                        values[:] = found.values[name]
                    else:
                        values[0] = found.values[name]
                for name, shape in found.shapes.items():
                    if shape not in shapes[name]:
                        shapes[name].append(shape)
                record = example.SerializeToString(deterministic=True)
                writer.write(record)
                index.append(begin)
                kept.append(place)
                begin += len(record) + FRAME
        with beside.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        content = np.stack([index, hashes[np.array(kept, int)]], axis=1).astype("<i8").tobytes()
        with written_whole(path.with_suffix(".index")) as beside_index:
            beside_index.write_bytes(content)
    return Shard(
        planned.name,
        planned.split,
        len(index),
        begin,
        digest,
        hashlib.sha256(content).hexdigest(),
        {name: merged(found) for name, found in shapes.items()},
        skipped,
    )


def _take_out(damaged: Damaged, options: Options, console: Console) -> None:
    """Says what is left out.

    Raises:
        RunError: nothing is to be.
    """
    line = one_line(f"{from_here(damaged.where)}: {damaged.why}").rstrip(".")
    if not options.skip:
        raise RunError(f"{line}; mend or remove it, or leave such input out by --on-error skip.")
    console.warn(f"{line}; left out.")


@contextlib.contextmanager
def _said(manifest: Manifest, path: Path) -> Iterator[None]:
    """Says in one line what cannot be written.

    Raises:
        RunError: instead of the error within, once the manifest says what is there.
    """
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        if manifest.shards:
            with contextlib.suppress(OSError):
                manifest.write()
        raise RunError(
            f"{from_here(path)}: cannot be written: {reason(error)}; {len(manifest.shards)} of "
            f"{_files(manifest.planned)} are there; make room for the rest, or mend what is wrong, "
            "and run the same command again, which goes on from there."
        ) from error


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """Yields what is told how many examples more are written: a bar, or lines now and then."""
    columns = [TextColumn("examples"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, disable=console.width is None, transient=True) as bar:
        task = bar.add_task("write", total=total)
        done, said_at = 0, time.monotonic()

        def advance(examples: int) -> None:
            nonlocal done, said_at
            done += examples
            bar.advance(task, examples)
            if console.width is None and time.monotonic() - said_at > _SAY_EVERY and done < total:
                said_at = time.monotonic()
                console.say(f"{done} of {total} examples")

        yield advance


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def _summary(manifest: Manifest) -> str:
    """Says what is in a folder."""
    parts = []
    for split in manifest.splits():
        shards = manifest.of(split)
        parts.append(f"{split} {sum(shard.examples for shard in shards)}")
    said = f"{', '.join(parts)} in {_files(len(manifest.shards))}"
    kinds = []
    for name, feature in manifest.features.items():
        shape = feature.shape
        if feature.encoding == "image":
            shape = merged(s.shapes[name] for s in manifest.shards if s.examples)
        sizes = ", ".join("?" if size is None else str(size) for size in shape)
        kinds.append(f"{name} {feature.dtype}" + f" [{sizes}]" * bool(shape))
    said += f"; features: {one_line(', '.join(kinds), 200)}"
    if manifest.class_names:
        said += f"; classes: {one_line(', '.join(manifest.class_names), 200)}"
    skipped = len(manifest.skipped) + sum(len(shard.skipped) for shard in manifest.shards)
    return said + f"; {skipped} left out" * bool(skipped)
