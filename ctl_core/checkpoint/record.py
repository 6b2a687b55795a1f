"""Reads and writes the records of checkpoints, and lists the files of a checkpoint.

A checkpoint without a record is ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from ctl_core import __version__
from ctl_core.run.errors import SetupError
from ctl_core.run.files import atomic_write, flush_to_disk, relative_path, remove
from ctl_core.run.layers import parse_settings
from ctl_core.run.settings import LARGEST, SettingValue

# Increase this number if another version of the engine could misread a record of this version.
FORMAT = 2
# A file in the run folder, outside of ckpt/, which says that the run has saved checkpoints.
_NOTE = "first_checkpoint"
# Matches the part of a file name that TensorFlow adds to the prefix of a checkpoint.
_TENSOR_FILE = r"\.(?:index|data-\d{5}-of-\d{5})"
_USER_FILE = re.compile(rf"[^/\\]+-(?P<step>\d+){_TENSOR_FILE}")
_ENGINE_FILE = re.compile(
    rf"(?:ckpt|input|statistics)-(?P<step>\d+)(?:-\d+)?(?:{_TENSOR_FILE}|\.json)"
)
# The names of the values that layers learn in ``adapt``.
LearnedName = Literal["vocabulary", "idf_weights", "bin_boundaries", "mean", "variance"]


class Damaged(RuntimeError):
    """A part of a checkpoint cannot be read."""


@dataclasses.dataclass
class Record:
    """The values of a checkpoint that are not tensors.

    A record may come from another person, so its types are checked when it is read.

    Attributes:
        step: the number of steps that were taken
        input: a description of the data; runs with equal descriptions read the same examples in the
            same order
        input_saved: whether a complete position in the data was saved
        replicas: the number of replicas that trained
        learning_rate: the setting ``learning_rate``, to detect a change
        frozen: the result of ``recording.read_flags``: a flag for each layer and variable
        created: the names of the variables in the engine's part
        progress: the fields of ``state.Progress``
        reader: the position of a reader in Python, as a string
        compiled: whether XLA compiles the steps of the run; None in a record of engine 1.0
        learnt: the values that preprocessing layers have learned, see vocabularies.py
        settings: the settings of the run, in the format of config.yaml; empty in a record of
            engine 1.0
        sizes: the result of ``measure_files``; empty in a record of engine 1.0
        logical_replicas: the setting ``logical_replicas``
        intra_op_threads: the number of threads of an op; None if the run does not fix it
        generators: the initial states of random generators; empty in a record of engine 2.0 or
            older without logical replicas
        leaves: the number of leaves of a batch; None in a record of engine 2.0 or older
        run_id: a random string that all checkpoints of a run have in common, and that no other run
            has; empty in the records of a run that engine 2.0 or older began
        is_finite: whether the weights were finite, see ``FiniteVariables``; None if they were not
            checked
        kernel_variables: the environment variables that choose kernels, see
            ``read_kernel_variables``; None without logical replicas
        digests: the result of ``digest_files``; empty if the run had no mirror
        set_order: the result of ``fingerprint_order`` in the process that trained; None in a record
            of engine 2.0
        format: the ``FORMAT`` of the engine that wrote the record
        engine: the version of that engine
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int
    input: dict[str, Any]
    input_saved: bool
    replicas: int
    learning_rate: float
    frozen: list[bool]
    created: list[str]
    progress: dict[str, Any]
    reader: str = ""
    compiled: bool | None = None
    learnt: dict[str, dict[LearnedName, list[str | int | float]]] = dataclasses.field(
        default_factory=dict
    )
    settings: str = ""
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    logical_replicas: int | None = None
    intra_op_threads: int | None = None
    generators: list[list[int]] = dataclasses.field(default_factory=list)
    run_id: str = ""
    is_finite: bool | None = None
    kernel_variables: dict[str, str] | None = None
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    set_order: int | None = None
    leaves: int | None = None
    format: int = FORMAT
    engine: str = __version__


def list_saved_steps(folder: Path) -> list[int]:
    """Returns the steps of all records in a checkpoint folder, newest first."""
    matches = (re.fullmatch(r"ckpt-(\d+)\.json", name) for name in list_names(folder / "engine"))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def note_first_checkpoint(run: Path, step: int) -> None:
    """Notes in the run folder that the run has saved a checkpoint.

    If the checkpoints are deleted later, the note shows that the run has trained already.
    """
    note = run / _NOTE
    if not note.exists():
        with atomic_write(note) as temporary:
            temporary.write_text(f"The first checkpoint was saved after step {step}.\n", "utf-8")


def has_lost_checkpoints(run: Path) -> bool:
    """Returns True if a run has saved checkpoints, and all of them were deleted.

    The copy of the best checkpoint may still exist.
    """
    folder = run / "ckpt"
    if list_saved_steps(folder) or any(name.endswith(".index") for name in list_names(folder)):
        return False
    return (run / _NOTE).exists() or bool(list_saved_steps(folder / "best"))


def forget_checkpoints(run: Path) -> None:
    """Removes what is left of the checkpoints of a run, so that the run starts over."""
    remove(run / "ckpt")
    remove(run / _NOTE)


def list_names(folder: Path) -> list[str]:
    """Returns the names of the files and folders in a folder; an empty list if it does not exist.

    ``os.listdir`` is used because ``Path.glob`` takes five times as long.
    """
    if not folder.is_dir():
        return []
    return os.listdir(folder)


def find_user_part(folder: Path, step: int) -> Path:
    """Returns the path prefix of the user's part of a checkpoint.

    The manager of ``create_ckpt`` may use any prefix, so only the step in the names is compared.

    Raises:
        Damaged: the user's part does not exist.
    """
    for name in list_names(folder):
        if name.endswith(f"-{step}.index") and _find_step(_USER_FILE, name) == step:
            return folder / name.removesuffix(".index")
    raise Damaged("one of its files is missing")


def write_record(folder: Path, record: Record) -> None:
    """Writes the record of a checkpoint; all other files must have been written before.

    The record is written completely or not at all. All files are flushed to the disk, so that a
    power cut causes no more damage than a kill.
    """
    engine = folder / "engine"
    path = engine / f"ckpt-{record.step}.json"
    record.sizes = measure_files(folder, record.step)
    flush_to_disk(*list_files(folder, record.step), folder / "checkpoint", engine, folder)
    content = dataclasses.asdict(record)
    with atomic_write(path) as temporary:
        text = json.dumps({**content, "checksum": _compute_checksum(content)})
        temporary.write_text(text, encoding="utf-8")


def measure_files(folder: Path, step: int) -> dict[str, int]:
    """Returns the sizes in bytes of the files that contain the variables of a checkpoint.

    Files with the position in the data, and files of single replicas, are left out, because a run
    can be resumed without them.

    Returns:
        The sizes by names such as ``user.index``, which do not depend on the manager's prefix.

    Raises:
        Damaged: the user's part does not exist.
    """
    prefixes = {"user": find_user_part(folder, step), "engine": folder / "engine" / f"ckpt-{step}"}
    sizes = {}
    for owner, prefix in prefixes.items():
        beginning = f"{prefix.name}."
        for name in list_names(prefix.parent):
            suffix = name.removeprefix(prefix.name)
            if name.startswith(beginning) and re.fullmatch(_TENSOR_FILE, suffix):
                sizes[owner + suffix] = (prefix.parent / name).stat().st_size
    return sizes


def digest_files(folder: Path, step: int) -> dict[str, str]:
    """Returns the SHA-256 of each file of a checkpoint except the record.

    Returns:
        The digests in hexadecimal digits, by the path of the file relative to the folder.
    """
    digests = {}
    for path in list_files(folder, step):
        if path.suffix != ".json":
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            digests[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return digests


def check_digests(folder: Path, record: Record) -> None:
    """Checks the contents of all files of a checkpoint, if its record contains their digests.

    Raises:
        Damaged: a file is missing, or has other content than when the checkpoint was saved.
    """
    digests = digest_files(folder, record.step)
    for path, digest in record.digests.items():
        if digests.get(path) != digest:
            raise Damaged(f"the content of {path} has changed")


def _compute_checksum(content: dict[str, Any]) -> str:
    """Returns the SHA-256 of a record's content, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_record(folder: Path, step: int) -> Record:
    """Reads the record of a checkpoint, and checks the sizes of the checkpoint's files.

    Records of engine 1.0 have neither a checksum nor sizes.

    Raises:
        Damaged: the record cannot be read or belongs to another step, or a file of the checkpoint
            is incomplete.
        SetupError: another version of the engine wrote the record, and this version could misread
            it.
    """
    path = folder / "engine" / f"ckpt-{step}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.get("format")
        if content.pop("checksum", None) not in (None, _compute_checksum(content)):
            raise ValueError("its checksum does not match")
        if version != FORMAT and isinstance(version, int | None):
            raise SetupError(
                f"{relative_path(folder)}: its checkpoints were written by ctl_core "
                f"{content.get('engine', '0.3')}, and {__version__} cannot resume them; start "
                f"another run with their weights: --init-from {relative_path(folder.parent)}."
            )
        record = _create_reader().validate_json(json.dumps(content), strict=True)
        _check_ranges(record)
        _check_progress(record)
        _check_settings(record)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise Damaged("its record cannot be read") from error
    if record.step != step:
        raise Damaged(f"its record belongs to step {record.step}")
    if record.sizes and measure_files(folder, step) != record.sizes:
        raise Damaged("one of its files is incomplete")
    return record


def _check_ranges(record: Record) -> None:
    """Checks the numbers of a record; raises a ValueError if one of them is impossible."""
    counts = [
        record.replicas, record.logical_replicas, record.intra_op_threads, record.leaves,
    ]  # fmt: skip
    if not all(1 <= count <= LARGEST for count in counts if count is not None):
        raise ValueError("a number is out of range")
    if not 0 < record.learning_rate < math.inf:
        raise ValueError("the learning rate is out of range")
    if not all(-(2**63) <= word < 2**64 for state in record.generators for word in state):
        raise ValueError("the state of a generator is out of range")


def _check_progress(record: Record) -> None:
    """Checks the progress in a record; raises an error if a value contradicts the others."""
    progress = record.progress
    planned_last = progress.get("ended")
    if not 0 <= record.step <= LARGEST or not 0 <= progress.get("examples", 0) <= LARGEST:
        raise ValueError("a count is out of range")
    if not -1 <= progress.get("evaluated", -1) <= record.step:
        raise ValueError("the last evaluation is later than the checkpoint")
    # A run that was ended, and forked with fewer steps, still has more planned steps than steps.
    if planned_last is not None and not record.step <= planned_last <= LARGEST:
        raise ValueError("the planned last step is impossible")
    for _, step, evaluations in progress.get("best", {}).values():
        if not -1 <= step <= record.step or not 0 <= evaluations <= LARGEST:
            raise ValueError("the best step is impossible")


def _check_settings(record: Record) -> None:
    """Checks that a record agrees with the settings in it; raises a ValueError if it does not."""
    settings = _parse_settings(record.settings)
    values = {
        "learning_rate": record.learning_rate,
        "logical_replicas": record.logical_replicas,
        "intra_op_threads": record.intra_op_threads,
    }
    for name in ("batch_size", "last_batch", "overfit_batches"):
        values[name] = record.input.get(name)
    # With ``auto``, the device and the graph decide. Engine 1.0 did not record the decision.
    if settings.get("jit_compile") != "auto" and record.compiled is not None:
        values["jit_compile"] = record.compiled
    for name, value in values.items():
        if name in settings and settings[name] != value:
            raise ValueError(f"it contradicts the setting {name}")


@functools.lru_cache(maxsize=16)  # most records of a run contain the same settings
def _parse_settings(text: str) -> dict[str, SettingValue]:
    """Parses the settings in a record; raises a ValueError if they are not valid YAML."""
    try:
        return parse_settings(text, "settings")
    except SetupError as error:
        raise ValueError(str(error)) from error


def read_run_id(path: Path) -> str:
    """Returns the id of a run from a record without the other files of its checkpoint.

    Returns:
        The id; an empty string if the record has none, or cannot be read.
    """
    try:
        run_id = json.loads(path.read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return ""
    if isinstance(run_id, str):
        return run_id
    return ""


@functools.cache
def _create_reader() -> TypeAdapter[Record]:
    """Returns the validator for the types of a record.

    The validator is created in the first call, because a run that does not resume never needs it.
    """
    return TypeAdapter(Record)


def read_complete_records(folder: Path) -> Iterator[Record]:
    """Reads the records of a folder of checkpoints, newest first; leaves out damaged ones.

    Raises:
        SetupError: another version of the engine wrote a record, see ``read_record``.
    """
    for step in list_saved_steps(folder):
        with contextlib.suppress(Damaged):
            yield read_record(folder, step)


def find_newest_usable(folder: Path, needs_finite: bool = True) -> int:
    """Returns the step of the newest complete checkpoint, or -1.

    Args:
        folder: the folder with the checkpoints
        needs_finite: whether to leave out checkpoints whose weights are not finite
    """
    for record in read_complete_records(folder):
        if record.is_finite is not False or not needs_finite:
            return record.step
    return -1


def is_whole(folder: Path, step: int) -> bool:
    """Returns True if a folder contains a complete checkpoint of a step."""
    try:
        read_record(folder, step)
    except (Damaged, SetupError):
        return False
    return True


def list_files(folder: Path, step: int) -> list[Path]:
    """Returns the files of a checkpoint, the record last.

    Files that each process writes for itself, such as ``statistics-8-0``, are included for all
    processes. Other files, such as a user's ``plot-8.png``, are not part of the checkpoint.
    """
    # Most names belong to other steps. To skip them, a substring test is ten times as fast as a
    # regular expression.
    user_names, engine_names = (
        [name for name in list_names(parent) if f"-{step}" in name]
        for parent in (folder, folder / "engine")
    )
    names = group_by_step(user_names, engine_names)
    return [folder / name for name in names.get(step, [])]


def group_by_step(user_names: Iterable[str], engine_names: Iterable[str]) -> dict[int, list[str]]:
    """Returns the files of all checkpoints by step, with the record of each checkpoint last.

    Args:
        user_names: the names in a checkpoint folder; files that belong to no checkpoint are left
            out
        engine_names: the names in the subfolder ``engine`` of that folder

    Returns:
        For each step, the paths of the files relative to the checkpoint folder.
    """
    files: dict[int, list[str]] = {}
    for pattern, names, place in (
        (_USER_FILE, user_names, ""),
        (_ENGINE_FILE, engine_names, "engine/"),
    ):
        for name in names:
            step = _find_step(pattern, name)
            if step is not None:
                files.setdefault(step, []).append(place + name)
    for step, paths in files.items():
        paths.sort(key=f"engine/ckpt-{step}.json".__eq__)
    return files


def copy_checkpoint(folder: Path, step: int, target: Path) -> None:
    """Copies a checkpoint; uses hard links if the file system supports them.

    Args:
        folder: the folder with the checkpoint
        step: the step of the checkpoint
        target: a folder for this copy only, which must not exist yet
    """
    (target / "engine").mkdir(parents=True)
    for path in list_files(folder, step):
        copy = target / path.relative_to(folder)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copy2(path, copy)


def find_best_step(best: dict[str, list[float]]) -> int:
    """Returns the step of the checkpoint that ``keep_best`` keeps, or -1.

    Args:
        best: the best value of each criterion, the step of this value, and the number of later
            evaluations; see ``Criterion``
    """
    steps = [int(step) for key, (_, step, _) in best.items() if key.startswith("keep_best=")]
    return max(steps, default=-1)


def list_engine_steps(folder: Path) -> set[int]:
    """Returns the steps for which a checkpoint folder contains any of the engine's files."""
    steps = {_find_step(_ENGINE_FILE, name) for name in list_names(folder / "engine")}
    return {step for step in steps if step is not None}


def _find_step(pattern: re.Pattern[str], name: str) -> int | None:
    """Returns the step in the name of a file; None if the name does not match the pattern."""
    match = pattern.fullmatch(name)
    if match is None:
        return None
    return int(match["step"])
