"""Tests of a run's files that are damaged, left behind by a kill, or written by somebody else."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctl_core.checkpoint.record import (
    Damaged,
    is_whole,
    list_files,
    list_saved_steps,
    read_record,
    write_record,
)
from ctl_core.checkpoint.retention import keep_best, remove_orphans, sweep
from ctl_core.checkpoint.run_settings import read_run_settings
from ctl_core.commands.cli import parse_command
from ctl_core.model.state import Progress
from ctl_core.run.errors import SetupError
from ctl_core.run.layers import parse_settings, write_config
from tests.helpers.run_folders import SETTINGS, write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Returns the folder of a run with checkpoints of steps 4 and 6."""
    run = tmp_path / "runs" / "a"
    write_checkpoint(run / "ckpt", 4)
    write_checkpoint(run / "ckpt", 6)
    write_config(SETTINGS, run / "config.yaml")
    return run


# ---- Records -----------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any], with_checksum: bool) -> None:
    """Changes a record. If ``with_checksum`` is false, it looks like a record of engine 1.0."""
    content = json.loads(path.read_text())
    if not with_checksum:
        for name in ("checksum", "sizes", "settings"):
            del content[name]
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda record: [],
    "a number": lambda record: 5,
    "a field less": lambda record: {key: record[key] for key in record if key != "frozen"},
    "an unknown field": lambda record: record.update(other=1),
    "no step": lambda record: record.update(step=None),
    "no input": lambda record: record.update(input=None),
    "flags": lambda record: record.update(frozen=None),
    "created": lambda record: record.update(created=None),
    "progress as a list": lambda record: record.update(progress=[]),
    "learnt as a list": lambda record: record.update(learnt=[]),
    "no reader": lambda record: record.update(reader=None),
    "rate as a text": lambda record: record.update(learning_rate="x"),
    "replicas as a text": lambda record: record.update(replicas="x"),
    "format as a text": lambda record: record.update(format="2"),
    "a planned step before": lambda record: record["progress"].update(ended=5),
    "a later evaluation": lambda record: record["progress"].update(evaluated=7),
    "negative examples": lambda record: record["progress"].update(examples=-8),
    "a best value alone": lambda record: record["progress"].update(best={"keep_best=loss": [1.0]}),
    "a best step later": lambda record: record["progress"].update(best={"a": [0.5, 7, 0]}),
    "no replicas": lambda record: record.update(replicas=0),
    "no threads": lambda record: record.update(intra_op_threads=-1),
    "an infinite rate": lambda record: record.update(learning_rate=float("inf")),
    "a wide generator": lambda record: record.update(generators=[[2**64, 0]]),
    "a path as a vocabulary": lambda record: record.update(
        learnt={"model/0/StringLookup": {"vocabulary": "/etc/passwd"}}
    ),
    "another argument of set_vocabulary": lambda record: record.update(
        learnt={"model/0/StringLookup": {"vocabulary": ["a"], "oov_token": ["b"]}}
    ),
}


@pytest.mark.parametrize("with_checksum", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_record_of_a_wrong_shape_is_damaged(run: Path, damage: str, with_checksum: bool) -> None:
    rewrite(run / "ckpt/engine/ckpt-6.json", DAMAGES[damage], with_checksum)
    with pytest.raises(Damaged, match="its record cannot be read"):
        read_record(run / "ckpt", 6)


def test_record_without_a_checksum_is_read(run: Path) -> None:
    """Engine 1.0 wrote records without a checksum."""
    expected = read_record(run / "ckpt", 6)
    rewrite(run / "ckpt/engine/ckpt-6.json", lambda record: None, with_checksum=False)
    record = read_record(run / "ckpt", 6)
    assert record == dataclasses.replace(expected, sizes={}, settings="")


def test_planned_step_that_no_run_can_reach_is_damage(run: Path) -> None:
    """The settings have 8 steps, but the run may be a fork of one with more steps."""
    for planned, is_damaged in ((8, False), (100, False), (2**63, True)):
        record = read_record(run / "ckpt", 4)
        record.progress["ended"] = planned
        write_record(run / "ckpt", record)
        assert is_whole(run / "ckpt", 4) is not is_damaged


@pytest.mark.parametrize(
    "change",
    [
        {"compiled": True},
        {"learning_rate": 0.2},
        {"logical_replicas": 2},
        {"intra_op_threads": 3},
        {"input": {"batch_size": 16, "last_batch": "drop", "overfit_batches": 0}},
        {"settings": "steps: ["},
    ],
)
def test_value_that_contradicts_the_settings_in_the_record_is_damage(
    run: Path, change: dict[str, Any]
) -> None:
    """The checksum is right."""
    config = dataclasses.replace(SETTINGS, jit_compile=False)
    record = write_checkpoint(run / "ckpt", 6, config=config)
    for compiled in (False, None):  # Engine 1.0 did not record whether steps were compiled.
        write_record(run / "ckpt", dataclasses.replace(record, compiled=compiled))
        assert is_whole(run / "ckpt", 6)
    write_record(run / "ckpt", dataclasses.replace(record, **change))
    assert not is_whole(run / "ckpt", 6)


def test_plausible_change_of_a_record_is_damage(run: Path) -> None:
    rewrite(run / "ckpt/engine/ckpt-6.json", lambda r: r.update(replicas=2), with_checksum=True)
    with pytest.raises(Damaged):
        read_record(run / "ckpt", 6)


@pytest.mark.parametrize("name", ["ckpt-6.index", "engine/ckpt-6.data-00000-of-00001"])
def test_file_of_another_size_is_damage(run: Path, name: str) -> None:
    (run / "ckpt" / name).write_bytes(b"x")
    with pytest.raises(Damaged, match="incomplete"):
        read_record(run / "ckpt", 6)


@pytest.mark.parametrize(
    "change",
    [
        {"other": 1},
        {"examples": "many"},
        {"best": {"keep_best=loss:min": "y"}},
        {"noted": {"first": "x"}},
        {"metrics": None},
    ],
)
def test_progress_of_a_wrong_shape_is_refused(change: dict[str, Any]) -> None:
    fields = dataclasses.asdict(Progress(best={"early_stop=loss:3": [float("nan"), 4, 1]}))
    restored = Progress.from_json(json.loads(json.dumps(fields)))
    assert repr(restored) == repr(Progress(**{**fields, "noted": restored.noted}))
    with pytest.raises(ValueError, match="validation error"):
        Progress.from_json({**fields, **change})


# ---- Settings ----------------------------------------------------------------------------------


def write_lines(count: int) -> Callable[[Path], Any]:
    """Returns a function that truncates a file to its first ``count`` lines."""
    return lambda path: path.write_text("\n".join(path.read_text().splitlines()[:count]) + "\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text(""), "steps, .*is missing"),
        (write_lines(2), "batch_size.*is missing"),
        (write_lines(-1), "hparams.optimizer.*is missing"),
        (lambda path: path.write_text(path.read_text() + "seed: 3\n"), "'seed' is given twice"),
        (lambda path: path.write_text(path.read_text().split("_size")[0]), "not valid YAML"),
    ],
)
def test_damaged_config_file_of_a_run_is_refused(
    run: Path, damage: Callable[[Path], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged config.yaml is an error, because missing settings would silently be defaults.

    Without the file, a run uses the settings that its checkpoints record.
    """
    path = run / "config.yaml"
    damage(path)
    monkeypatch.chdir(run.parent.parent)
    flags = ["train", "--run-name", "a"]
    where = "runs/a/config.yaml"
    with pytest.raises(SetupError, match=f"^{where}: .*{message}.*: rm {where}$"):
        parse_command(flags)
    path.unlink()
    config = parse_command(flags).config
    assert config == dataclasses.replace(SETTINGS, run_name="a", callbacks=config.callbacks)


def test_edited_config_file_of_a_run_counts(run: Path) -> None:
    path = run / "config.yaml"
    edited = yaml.safe_load(path.read_text()) | {"batch_size": 16}
    edited["hparams"] |= {"optimizer": "sgd", "depth": 2}
    path.write_text(yaml.safe_dump(edited))
    assert read_run_settings(run).values == edited


def test_settings_come_from_the_newest_record_that_is_whole(run: Path) -> None:
    (run / "config.yaml").unlink()
    (run / "ckpt/engine/ckpt-6.json").write_text("{")
    assert read_run_settings(run).values["seed"] == 7


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "aliases expand to more than 100,000 values"),
        ("a: &a [*a]", "aliases expand to more than 100,000 values"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("seed: " + "9" * 5000, "not valid YAML"),
        ("a: 1\nb: {c: 1, c: 2}", "'c' is given twice"),
        ("- 1", "expected lines"),
    ],
)
def test_hostile_settings_file_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(SetupError, match=f"^file: .*{message}") as caught:
        parse_settings(text, "file")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_aliases_and_merged_mappings_are_read() -> None:
    text = "base: &base {width: 1, depth: 2}\nhparams:\n  <<: *base\n  width: 3\nlist: [*base]"
    values = parse_settings(text, "file")
    assert values["hparams"] == {"width": 3, "depth": 2}


# ---- Files that a killed process leaves --------------------------------------------------------


def test_files_of_a_user_are_not_part_of_a_checkpoint(run: Path) -> None:
    folder = run / "ckpt"
    others = ["plot-6.png", "engine/notes-6.txt", "ckpt-16.index", "best-6.tar.data-0"]
    for name in others:
        (folder / name).write_bytes(b"")
    names = {path.relative_to(folder).as_posix() for path in list_files(folder, 6)}
    assert not names & set(others)
    assert len(names) == 8
    assert list_files(folder, 6)[-1].name == "ckpt-6.json"


def test_files_of_a_killed_process_are_removed(run: Path) -> None:
    folder = run / "ckpt"
    left = ["engine/statistics-4-0_temp", "ckpt-4_temp", "best.tmp"]
    for name in left:
        (folder / name).mkdir()
        (folder / name / "part").write_bytes(b"")
    files = ["engine/ckpt-4.json.tmp", "engine/ckpt-6.data-00000-of-00001.tempstate123"]
    for name in files:
        (folder / name).write_bytes(b"")
    (folder / "kept_temp").mkdir()  # This folder belongs to the user.
    sweep(folder)
    assert not any((folder / name).exists() for name in [*left, *files])
    assert (folder / "kept_temp").exists()
    assert is_whole(folder, 4)
    assert is_whole(folder, 6)


def test_checkpoint_that_is_half_removed_goes(run: Path) -> None:
    """The files of a checkpoint are removed if a process was killed after removing its record."""
    folder = run / "ckpt"
    for name in ("ckpt-4.index", "ckpt-4.data-00000-of-00001", "engine/ckpt-4.json"):
        (folder / name).unlink()
    remove_orphans(folder)
    assert list_files(folder, 4) == []
    assert is_whole(folder, 6)


def test_torn_copy_of_the_best_checkpoint_is_copied_again(run: Path) -> None:
    folder = run / "ckpt"
    record = write_checkpoint(folder, 6, best=6)
    keep_best(folder, record, folder)
    assert is_whole(folder / "best", 6)
    torn = folder / "best" / "ckpt-6.data-00000-of-00001"
    torn.unlink()
    torn.write_bytes(b"w")
    sweep(folder)
    keep_best(folder, record, folder)
    assert is_whole(folder / "best", 6)
    # If the original is lost, the damaged copy is kept, so that the user can inspect it.
    torn.unlink()
    for path in list_files(folder, 6):
        path.unlink()
    sweep(folder)
    assert list_saved_steps(folder / "best") == [6]
