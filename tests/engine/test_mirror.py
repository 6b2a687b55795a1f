"""Tests of mirrors: a run survives the loss of its machine and failures during copies."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.checkpoint import copying, mirror, record, stores
from ctl_core.checkpoint.mirror import Mirror, fetch_run
from ctl_core.checkpoint.record import copy_checkpoint, is_whole, list_files, list_saved_steps
from ctl_core.commands.cli import parse_command
from ctl_core.run.console import Console
from ctl_core.run.errors import SetupError
from ctl_core.run.settings import Config
from tests.golden import engine, small
from tests.golden.compare import read_checkpoint
from tests.helpers.cases import make_hooks
from tests.helpers.pausing import PAUSING
from tests.helpers.project import EVALUATED, Cli, refused
from tests.helpers.run_folders import write_checkpoint
from tests.helpers.waiting import wait_until_or_ended

CONFIG = Config(run_name="a", runs_dir="runs", mirror="there", batch_size=8)


class Killed(BaseException):
    """Simulates a kill. Handlers of ``Exception`` do not catch it."""


class Fuse:
    """Lets a number of operations pass and raises ``Killed`` at the next operation."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def burn(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*values: Any) -> Any:
            self.burn()
            return function(*values)

        return guarded


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables flushes to disk, which take milliseconds and matter only after a power cut."""
    for module in (stores, mirror, record):
        monkeypatch.setattr(module, "flush_to_disk", lambda *paths: None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty folder, in which tests train runs/a and copy it to there/a."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(step: int, best: int = -1) -> None:
    """Writes a checkpoint of the run, as training does. Two of its files contain the step."""
    ckpt = Path("runs/a/ckpt")
    saved = write_checkpoint(ckpt, step, best)
    for path in (ckpt / f"ckpt-{step}.index", ckpt / "engine" / f"input-{step}.index"):
        path.write_text(f"{step:05}")
    saved.digests = record.digest_files(ckpt, step)
    record.write_record(ckpt, saved)
    Path("runs/a/metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    if best == step:
        shutil.rmtree(ckpt / "best", ignore_errors=True)
        copy_checkpoint(ckpt, step, ckpt / "best")


def copy(step: int, best: int = -1, process: Mirror | None = None) -> None:
    """Copies a checkpoint of the run, and the best checkpoint, to the mirror.

    Without ``process``, each call copies as a new process does.
    """
    staged = Path("staged")
    shutil.rmtree(staged, ignore_errors=True)
    copy_checkpoint(Path("runs/a/ckpt"), step, staged / "newest")
    if best not in (-1, step):
        copy_checkpoint(Path("runs/a/ckpt/best"), best, staged / "best")
    (process or Mirror(CONFIG)).copy(staged, step, best)


def read_files(folder: Path, step: int) -> dict[str, bytes]:
    """Returns the contents of a checkpoint's files, keyed by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in list_files(folder, step)}


def lose_machine() -> None:
    shutil.rmtree("runs")


def fetch() -> int | None:
    """Fetches the run to a new machine, checks the fetched files, and returns the step."""
    lose_machine()
    Path("runs/a").mkdir(parents=True)
    step = Mirror(CONFIG).fetch(-1)
    assert not Path("runs/a", mirror.STAGING).exists()
    if step is not None:
        assert is_whole(Path("runs/a/ckpt"), step)
        assert Path("runs/a/ckpt", f"ckpt-{step}.index").read_text() == f"{step:05}"
        assert Path("runs/a/ckpt/engine", f"input-{step}.index").read_text() == f"{step:05}"
    return step


# ---- Copying and fetching -----------------------------------------------------------------------


@pytest.mark.usefixtures("place")
def test_newest_checkpoints_and_the_best_one_are_kept() -> None:
    for step in range(1, 7):
        save(step, best=min(step, 2))
        copy(step, best=min(step, 2))
    assert list_saved_steps(Path("there/a/ckpt")) == [6, 5, 4, 2]
    assert not [path for path in Path("there/a/ckpt").rglob("*-3*")]
    assert fetch() == 6
    assert list_saved_steps(Path("runs/a/ckpt/best")) == [2]
    assert is_whole(Path("runs/a/ckpt/best"), 2)
    assert list_saved_steps(Path("runs/a/ckpt")) == [6]
    state = tf.train.get_checkpoint_state("runs/a/ckpt")
    assert [Path(path).name for path in state.all_model_checkpoint_paths] == ["ckpt-6"]


@pytest.mark.usefixtures("place")
def test_best_one_is_copied_if_its_own_copy_has_failed() -> None:
    save(1, best=1)
    save(2, best=1)
    copy(2, best=1)
    assert list_saved_steps(Path("there/a/ckpt")) == [2, 1]


@pytest.mark.usefixtures("place")
def test_later_steps_of_an_abandoned_past_are_removed() -> None:
    """A run that was restarted from an earlier step must not resume from an old later step."""
    for step in (1, 2, 3):
        save(step)
        copy(step)
    save(2)
    copy(2)
    assert list_saved_steps(Path("there/a/ckpt")) == [2, 1]
    assert fetch() == 2


def fill_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def cut_connection(store: stores.FolderStore, path: str, target: Path) -> None:
    target.write_bytes((store.root / path).read_bytes()[:-1])


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("fail", [fill_disk, cut_connection, None])
def test_run_does_not_start_if_the_newer_checkpoint_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, fail: Callable[..., None] | None
) -> None:
    """Otherwise, the run would soon replace the newer checkpoints in the mirror."""
    save(2)
    copy(2)
    shutil.copytree("runs", "kept")
    for step in (4, 6):
        save(step)
        copy(step)
    shutil.rmtree("runs")
    Path("kept").rename("runs")
    expected = small.read_files(Path("there/a/ckpt"))
    if fail is None:
        Path("there/a/metrics.jsonl").unlink()
        Path("there/a/metrics.jsonl").mkdir()
    else:
        monkeypatch.setattr(stores.FolderStore, "download", fail)
    before = small.read_files(Path("runs"))
    with pytest.raises(SetupError, match="mirror: there/a has a newer checkpoint, which cannot be"):
        fetch_run(CONFIG)
    assert small.read_files(Path("there/a/ckpt")) == expected
    assert {path for path in small.read_files(Path("runs")) if path.name != "pid"} == {*before}
    monkeypatch.undo()


@pytest.mark.usefixtures("place")
def test_damaged_checkpoint_gives_way_to_the_one_before(capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        save(step)
        copy(step)
    Path("there/a/ckpt/engine/ckpt-3.index").write_bytes(b"cut")
    Path("there/a/ckpt/engine/ckpt-2.json").write_text("{")
    assert fetch() == 1
    printed = capsys.readouterr().out
    assert "step 3 in there/a is damaged (one of its files is incomplete)" in printed
    assert "step 2 in there/a is damaged (its record cannot be read)" in printed
    Path("there/a/ckpt/ckpt-1.index").unlink()
    lose_machine()
    with pytest.raises(SetupError, match=r"there/a has checkpoints, but all of them are damaged"):
        fetch_run(CONFIG)
    assert list_saved_steps(Path("runs/a/ckpt")) == []


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ["ckpt-3.data-00000-of-00001", "engine/input-3.index"])
def test_bit_flip_in_the_mirror_is_found(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The checkpoint before is fetched, and the damaged one is replaced later."""
    for step in (2, 3):
        save(step)
        copy(step)
    path = Path("there/a/ckpt", name)
    content = bytearray(path.read_bytes())
    content[2] ^= 4
    path.write_bytes(content)
    assert fetch() == 2
    assert f"step 3 in there/a is damaged (the content of {name} has" in capsys.readouterr().out
    save(3)
    copy(3)
    assert fetch() == 3


@pytest.mark.usefixtures("place")
def test_checkpoint_of_another_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    save(1)
    copy(1)
    lose_machine()
    monkeypatch.setattr(record, "FORMAT", record.FORMAT + 1)
    with pytest.raises(SetupError, match=r"step 1 in there/a was written by a version of ctl_core"):
        fetch_run(CONFIG)
    assert list_saved_steps(Path("runs/a/ckpt")) == []


@pytest.mark.usefixtures("place")
def test_newer_of_the_two_places_is_used() -> None:
    """The checkpoint of the mirror is fetched only if it is newer than the run's own."""
    save(4)
    copy(4)
    lose_machine()
    save(2)
    fetch_run(CONFIG)
    assert list_saved_steps(Path("runs/a/ckpt")) == [4, 2]
    state = tf.train.get_checkpoint_state("runs/a/ckpt")
    assert [Path(path).name for path in state.all_model_checkpoint_paths] == ["ckpt-2", "ckpt-4"]
    Path("runs/a/ckpt/ckpt-4.index").write_text("0wn.5")
    fetch_run(CONFIG)
    assert Path("runs/a/ckpt/ckpt-4.index").read_text() == "0wn.5"


def test_names_that_the_engine_does_not_write_are_left_alone(place: Path) -> None:
    save(2)
    copy(2)
    there = Path("there/a")
    for name in ("ckpt/plot-2.png", "ckpt/engine/evil.py", "tb/train/evil.py", "evil.py"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text("")
    assert fetch() == 2
    assert not [path for path in place.rglob("*") if path.name in ("evil.py", "plot-2.png")
                and "there" not in path.parts]  # fmt: skip
    assert (there / "ckpt/plot-2.png").exists()


@pytest.mark.usefixtures("place")
def test_names_of_a_bucket_that_lead_elsewhere_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(2)
    copy(2)
    names = ["../../../evil-2.index", "..\\evil-2.index", "/evil-2.index"]
    listed = stores.FolderStore.list_names
    monkeypatch.setattr(
        stores.FolderStore, "list_names", lambda store, folder: [*listed(store, folder), *names]
    )
    assert fetch() == 2


def write_modules(contents: dict[str, str]) -> None:
    """Replaces the copies of the project's modules in the run's folder."""
    shutil.rmtree("runs/a/modules", ignore_errors=True)
    for name, content in contents.items():
        path = Path("runs/a/modules", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.usefixtures("place")
def test_fetched_run_has_the_modules_with_which_it_was_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Modules that the run no longer imports are removed, and unchanged ones are copied once."""
    trained = {"net.py": "new", "lr=0.1 (b)/nets/__init__.py": "", "lr=0.1 (b)/nets/big.py": "a"}
    save(2)
    write_modules({"net.py": "old", "gone/gone.py": ""})
    copy(2)
    assert Path("there/a/modules/gone/gone.py").exists()
    write_modules(trained)
    uploaded = list[str]()
    upload = stores.FolderStore.upload

    def note(store: stores.FolderStore, source: Path, path: str) -> None:
        uploaded.append(path)
        upload(store, source, path)

    monkeypatch.setattr(stores.FolderStore, "upload", note)
    process = Mirror(CONFIG)
    for step in (4, 6):
        save(step)
        copy(step, process=process)
    copied = [path for path in uploaded if path.startswith("modules")]
    assert sorted(copied) == sorted(f"modules/{name}" for name in trained)
    Path("there/a/modules/.DS_Store").touch()
    Path("there/a/modules/notes.txt").touch()
    lose_machine()
    save(2)
    write_modules({"net.py": "old", "stale.py": ""})
    names = ["..", ".", "../evil.py", "a\\..\\evil.py", "/evil.py", "C:evil.py"]
    listed = stores.FolderStore.list_names
    monkeypatch.setattr(
        stores.FolderStore, "list_names", lambda store, folder: [*listed(store, folder), *names]
    )
    fetch_run(CONFIG)
    assert list_saved_steps(Path("runs/a/ckpt")) == [6, 2]
    expected = {Path("runs/a/modules", name): trained[name].encode() for name in trained}
    assert small.read_files(Path("runs/a/modules")) == expected


# ---- Kills --------------------------------------------------------------------------------------


def cut_copying(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Copies until the fuse simulates a kill. Returns False if the copy was completed."""
    with monkeypatch.context() as patch:
        for name in ("upload", "remove"):
            function = getattr(stores.FolderStore, name)
            patch.setattr(stores.FolderStore, name, fuse.guard(function))
        try:
            copy(4, best=1)
        except Killed:
            return True
    return False


def fetch_after_each_cut(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Cuts the copy of the newest checkpoint at each of its operations, and fetches the run.

    Returns:
        The step that was fetched after each cut, and after the copy that was not cut.
    """
    shutil.copytree("runs", "kept-runs")
    shutil.copytree("there", "kept")
    fetched = list[int | None]()
    was_cut = True
    while was_cut:
        for name in ("there", "runs"):
            shutil.rmtree(name)
        shutil.copytree("kept", "there")
        shutil.copytree("kept-runs", "runs")
        was_cut = cut_copying(Fuse(len(fetched)), monkeypatch)
        fetched.append(fetch())
    return fetched


@pytest.mark.usefixtures("place")
def test_killed_while_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill at any operation of a copy, the new or the previous checkpoint is fetched."""
    config = dataclasses.replace(CONFIG, mirror_keep=2)
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", config)
    for step in (1, 2, 3):
        save(step, best=1)
        copy(step, best=1)
    save(4, best=1)
    fetched = fetch_after_each_cut(monkeypatch)
    assert fetched == [3] * fetched.count(3) + [4] * fetched.count(4)
    assert fetched.count(3) > 5
    assert fetched.count(4) > 2
    assert list_saved_steps(Path("there/a/ckpt")) == [4, 3, 1]


@pytest.mark.usefixtures("place")
def test_killed_while_it_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill at any operation leaves no partial checkpoint, and the next start fetches the run."""
    for step in (1, 2):
        save(step, best=1)
        copy(step, best=1)
    expected = read_files(Path("there/a/ckpt"), 2)
    was_cut = True
    operations = 0
    while was_cut:
        shutil.rmtree("runs")
        Path("runs/a").mkdir(parents=True)
        fuse = Fuse(operations)
        with monkeypatch.context() as patch:
            patch.setattr(stores.FolderStore, "download", fuse.guard(stores.FolderStore.download))
            patch.setattr(mirror, "_move", fuse.guard(mirror._move))
            patch.setattr(mirror, "_write_list", fuse.guard(mirror._write_list))
            patch.setattr(mirror, "remove", lambda path: None)  # A killed process deletes no file.
            try:
                assert Mirror(CONFIG).fetch(-1) == 2
                was_cut = False
            except (Killed, FileExistsError):
                was_cut = True
        ckpt = Path("runs/a/ckpt")
        assert list_saved_steps(ckpt) == ([] if was_cut else [2])
        fetch_run(CONFIG)
        assert list_saved_steps(ckpt) == [2]
        assert read_files(ckpt, 2) == expected
        assert list_saved_steps(ckpt / "best") == [1]
        assert is_whole(ckpt / "best", 1)
        operations += 1
    assert operations > 15


@pytest.mark.usefixtures("place")
def test_killed_while_it_replaces_a_damaged_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint is complete in the mirror before the damaged later one is removed."""
    for step in (1, 2, 8, 9):
        save(step)
        copy(step)
    for step in (8, 9):
        for path in list_files(Path("runs/a/ckpt"), step):
            path.unlink()
        Path(f"there/a/ckpt/engine/ckpt-{step}.index").write_bytes(b"cut")
    save(4, best=1)
    fetched = fetch_after_each_cut(monkeypatch)
    assert fetched == [2] * fetched.count(2) + [4] * fetched.count(4)
    assert fetched.count(2) > 5
    assert fetched.count(4) > 5
    assert list_saved_steps(Path("there/a/ckpt")) == [4, 2]


# ---- Training runs with a mirror ----------------------------------------------------------------

FLAGS = ["train", "--run-name=a", "--batch-size=16", "--ckpt-every=5", "--eval-every=5"]
HOOKS = (
    EVALUATED
    + """

def look(step, loss):
    ctl_core.report(step, loss=loss)


every_steps = {1: look}
"""
)


def train(cli: Cli, *flags: str) -> str:
    """Trains the run ``a`` and returns its output."""
    outcome = cli(None, *flags, command=FLAGS)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    return outcome.out


def read_values(run: Path, step: int) -> dict[str, np.ndarray]:
    """Returns the values in the checkpoint of a step, keyed by name."""
    return {
        f"{folder}/{name}": np.asarray(value)
        for folder in ("", "engine")
        for name, value in read_checkpoint(run, step, folder).items()
        if "ITERATOR" not in name
    }


def assert_same_run(run: Path, whole: Path, step: int) -> None:
    """Asserts that two runs have equal checkpoints, bit for bit, and equal metrics."""
    expected = read_values(whole, step)
    actual = read_values(run, step)
    assert expected.keys() == actual.keys()
    assert len(expected) > 3
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    assert (run / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def read_event_steps(run: Path) -> list[int]:
    """Returns the steps for which TensorBoard shows a loss, in order."""
    steps = []
    for file in (run / "tb/train").glob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            steps += [event.step for value in event.summary.value if value.tag == "loss"]
    return sorted(steps)


@pytest.mark.parametrize("kind", small.slow_but("path", of=["path", "file", "fsspec"]))
def test_run_that_loses_its_machine_is_the_uninterrupted_run(
    cli: Cli, tmp_path: Path, kind: str
) -> None:
    """A fetched run keeps its settings, even if no flag repeats them. Its curves have no gap."""
    address = {"path": "m", "file": f"file://{tmp_path}/m", "fsspec": f"memory://{tmp_path.name}"}
    (tmp_path / "callbacks.py").write_text(HOOKS)
    (tmp_path / "config.yaml").write_text(f"mirror: {address[kind]}\nhparams: {{a: 1}}\n")
    settings = ["--seed", "3", "--keep-best", "loss", "--hparams.a", "2"]
    out = train(cli, "--steps", "20", "--mirror", "null", *settings)
    assert "mirror" not in out
    Path("runs").rename("whole")
    out = train(cli, "--steps", "10", *settings)
    assert f"mirror: {address[kind]}/a has no checkpoint yet" in out
    assert "warning" not in out
    assert not Path("runs/a", mirror.STAGING).exists()
    lose_machine()
    out = train(cli, "--steps", "20")
    assert "fetching the checkpoint of step 10" in out
    assert "resuming at step 10" in out
    assert "warning" not in out
    assert_same_run(Path("runs/a"), Path("whole/a"), 20)
    assert read_event_steps(Path("runs/a")) == list(range(1, 21))
    config = ctl_core.load_config("runs/a/config.yaml")
    assert (config.seed, config.keep_best, config.hparams) == (3, "loss", {"a": 2})
    assert list_saved_steps(Path("runs/a/ckpt/best")) == [20]
    out = train(cli, "--steps", "20")
    assert "nothing left to train" in out


def test_checkpoint_that_was_not_copied_is_copied_by_the_next_start(
    cli: Cli, tmp_path: Path
) -> None:
    """The next start copies the checkpoint even if no step is left to train."""
    (tmp_path / "callbacks.py").write_text(HOOKS)
    train(cli, "--steps", "10")
    out = train(cli, "--steps", "10", "--mirror", "m")
    assert "nothing left to train" in out
    assert list_saved_steps(Path("m/a/ckpt")) == [10]
    assert is_whole(Path("m/a/ckpt"), 10)


def test_only_training_reads_the_mirror(cli: Cli, tmp_path: Path) -> None:
    """Evaluation, ``load``, forks and checks do not fetch a run. A fork inherits no mirror."""
    (tmp_path / "callbacks.py").write_text(HOOKS)
    train(cli, "--steps", "10", "--mirror", "m")
    lose_machine()
    refused(cli(None, "--mirror", "m", command=["train", "--fork=a", "--steps=12"]), "run_name")
    fork = ["train", "--fork=a", "--run-name=b", "--steps=12"]
    refused(cli(None, "--mirror=m", command=fork), "neither a run in runs")
    refused(cli(None, command=["evaluate", "a"]), "there is no run yet")
    with pytest.raises(SetupError):
        ctl_core.load("runs/a")
    parse_command(["train", "--check", "--run-name=a", "--mirror=m", "--steps=10"])
    assert not Path("runs/a").exists()
    train(cli, "--steps", "10", "--mirror", "m")
    outcome = cli(None, command=fork)
    assert "fork: that run used --mirror m, but this one does not" in outcome.out
    assert outcome.code == 0
    assert not Path("m/b").exists()


@pytest.mark.usefixtures("place")
def test_train_from_python_fetches() -> None:
    """``ctl_core.train`` fetches the run but uses the settings that the caller passes."""
    hooks = make_hooks()
    config = Config(steps=4, run_name="a", mirror="m", batch_size=24)
    ctl_core.train(hooks, config)
    lose_machine()
    state = ctl_core.train(hooks, dataclasses.replace(config, steps=6))
    assert state.step == 6
    assert "resuming at step 4" in Path("runs/a/train.log").read_text()


def test_mirror_needs_a_place_and_a_name(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "callbacks.py").write_text(HOOKS)
    start = ["train", "--steps=10"]
    refused(cli(None, command=[*start, "--mirror=m"]), "mirror: m needs run_name", "--run-name")
    start.append("--run-name=a")
    refused(cli(None, command=[*start, "--mirror=runs"]), "mirror: runs is runs_dir itself")
    refused(cli(None, command=[*start, "--mirror= "]), "mirror: expected a URL or a path")
    refused(cli(None, command=[*start, "--mirror=foo://b"]), "mirror: foo://b/a cannot be used")


# ---- A mirror that fails ------------------------------------------------------------------------


def test_mirror_without_rights_never_ends_a_training(cli: Cli, tmp_path: Path) -> None:
    """A warning reports the first failure, and another one at the end counts all failures.

    Not even root may write to /sys.
    """
    (tmp_path / "callbacks.py").write_text(HOOKS)
    out = train(cli, "--steps", "15", "--mirror", "/sys/mirror")
    warnings = [line for line in out.splitlines() if line.startswith("warning")]
    assert warnings[0].startswith(
        "warning: mirror: the checkpoint of step 5 could not be copied to /sys/mirror/a (Per"
    )
    assert warnings[1:] == [
        "warning: mirror: checkpoints that could not be copied to /sys/mirror/a: 3."
    ]
    assert list_saved_steps(Path("runs/a/ckpt")) == [15, 10, 5]


def test_mirror_that_works_again_gets_the_next_checkpoint(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "callbacks.py").write_text(HOOKS)
    upload = stores.FolderStore.upload

    def fail_at_first(store: stores.FolderStore, source: Path, path: str) -> None:
        if "-5" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        upload(store, source, path)

    monkeypatch.setattr(stores.FolderStore, "upload", fail_at_first)
    out = train(cli, "--steps", "10", "--mirror", "m")
    assert out.count("No space left on device") == 1
    assert "checkpoints that could not be copied to m/a: 1." in out
    assert list_saved_steps(Path("m/a/ckpt")) == [10]


def test_mirror_that_cannot_be_read_is_refused_unless_the_run_is_here(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is refused, because a new run would replace the checkpoints in the mirror."""
    (tmp_path / "callbacks.py").write_text(HOOKS)
    train(cli, "--steps", "5", "--mirror", "m")
    monkeypatch.setattr(stores.FolderStore, "list_names", raise_timeout)
    out = train(cli, "--steps", "10", "--mirror", "m")
    assert "the run resumes from its own checkpoint of step 5" in out
    lose_machine()
    outcome = cli(None, "--steps", "10", "--mirror", "m", command=FLAGS)
    refused(outcome, "mirror: m/a cannot be read: TimeoutError", "choose another run_name")


def test_run_that_could_not_list_the_mirror_copies_nothing_over_newer_checkpoints(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that missed the progress of another one trains, but leaves the mirror alone."""
    (tmp_path / "callbacks.py").write_text(HOOKS)
    train(cli, "--steps", "5", "--mirror", "m")
    shutil.copytree("runs", "kept")
    train(cli, "--steps", "20", "--mirror", "m")
    shutil.rmtree("runs")
    Path("kept").rename("runs")
    expected = small.read_files(Path("m"))
    list_names = stores.FolderStore.list_names
    failures = [1]

    def fail_once(store: stores.FolderStore, folder: str) -> list[str]:
        if failures:
            failures.pop()
            raise_timeout()
        return list_names(store, folder)

    monkeypatch.setattr(stores.FolderStore, "list_names", fail_once)
    out = train(cli, "--steps", "10", "--mirror", "m")
    assert "mirror: m/a cannot be read: TimeoutError: no answer" in out
    assert out.count("m/a has a checkpoint of step 20, which this run does not continue") == 1
    assert small.read_files(Path("m")) == expected
    out = train(cli, "--steps", "25", "--mirror", "m")
    assert "fetching the checkpoint of step 20" in out
    assert list_saved_steps(Path("m/a/ckpt"))[:2] == [25, 20]
    assert "ckpt-25.index" in record.read_record(Path("m/a/ckpt"), 25).digests


@pytest.mark.parametrize("steps", ["20", "5"])
def test_another_run_of_the_same_name_is_refused(cli: Cli, tmp_path: Path, steps: str) -> None:
    """The other run may have more or fewer steps. Neither of the two runs is changed."""
    (tmp_path / "callbacks.py").write_text(HOOKS)
    train(cli, "--steps", "10", "--seed", "1")
    Path("runs").rename("kept")
    train(cli, "--steps", steps, "--seed", "2", "--mirror", "m")
    shutil.rmtree("runs")
    Path("kept").rename("runs")
    before = {**small.read_files(Path("runs")), **small.read_files(Path("m"))}
    outcome = cli(None, "--steps", "15", "--mirror", "m", command=FLAGS)
    refused(
        outcome, f"m/a belongs to another run: its checkpoint of step {steps}", "but runs/a has"
    )
    assert before == {**small.read_files(Path("runs")), **small.read_files(Path("m"))}


def test_another_run_that_appears_during_training_is_left_alone(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror is empty when the run starts; then another run copies its first checkpoint."""
    (tmp_path / "callbacks.py").write_text(HOOKS)
    train(cli, "--steps", "5", "--mirror", "other")
    shutil.rmtree("runs")
    stage = copying.Copier._stage

    def stage_second(copier: copying.Copier, step: int, is_new: bool) -> None:
        if not Path("m").exists():
            shutil.copytree("other", "m")
        stage(copier, step, is_new)

    monkeypatch.setattr(copying.Copier, "_stage", stage_second)
    out = train(cli, "--steps", "15", "--mirror", "m")
    assert out.count("m/a belongs to another run: its checkpoint of step 5") == 1
    assert list_saved_steps(Path("m/a/ckpt")) == [5]


def test_mirror_that_refuses_the_connection_is_no_obstacle_to_a_run_that_is_here(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage such as SFTP connects when it is opened, rather than when it is first read."""

    def refuse(_: str) -> Any:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    (tmp_path / "callbacks.py").write_text(HOOKS)
    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    outcome = cli(None, "--steps", "5", "--mirror", "memory://m", command=FLAGS)
    refused(outcome, "mirror: memory://m/a cannot be read: ConnectionRefusedError")
    train(cli, "--steps", "5")
    out = train(cli, "--steps", "10", "--mirror", "memory://m")
    assert "the run resumes from its own checkpoint of step 5" in out
    assert "checkpoints that could not be copied to memory://m/a: 2." in out


@pytest.mark.usefixtures("place")
def test_folder_of_the_runs_by_another_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other path is a symbolic link, or a bind mount, which a changed ``samefile`` imitates."""
    save(2)
    Path("linked").symlink_to("runs")
    Path("mounted").mkdir()
    with pytest.raises(SetupError, match="is runs_dir itself"):
        Mirror(dataclasses.replace(CONFIG, mirror="linked"))
    Mirror(dataclasses.replace(CONFIG, mirror="mounted"))
    monkeypatch.setattr(
        os.path, "samefile", lambda *paths: {path.name for path in paths} == {"mounted", "runs"}
    )
    with pytest.raises(SetupError, match="is runs_dir itself"):
        Mirror(dataclasses.replace(CONFIG, mirror="mounted"))


def raise_timeout(*_: object) -> list[str]:
    raise TimeoutError("no answer")


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Lets SIGINT raise KeyboardInterrupt, even if a shell started the tests with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigint")
def test_end_waits_for_the_copy_and_ctrl_c_leaves_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the last checkpoint ends only after the line that the case is about."""
    (tmp_path / "callbacks.py").write_text(HOOKS)
    upload, say = stores.FolderStore.upload, Console.say
    is_free = threading.Event()

    def wait_and_upload(store: stores.FolderStore, source: Path, path: str) -> None:
        if path.endswith("-5.json"):
            assert is_free.wait(60)
        upload(store, source, path)

    def free_after_progress(console: Any, text: str) -> None:
        say(console, text)
        if "mirror: 0.0 of" in text:
            is_free.set()

    monkeypatch.setattr(stores.FolderStore, "upload", wait_and_upload)
    monkeypatch.setattr(copying, "PATIENCE", 0.1)
    monkeypatch.setattr(copying, "INTERVAL", 0.1)
    monkeypatch.setattr(Console, "say", free_after_progress)
    first = [signal.SIGTERM]
    wait = copying.Copier._wait

    def terminate_and_wait(copier: copying.Copier) -> None:
        os.kill(os.getpid(), first.pop())
        wait(copier)

    with monkeypatch.context() as patch:
        patch.setattr(copying.Copier, "_wait", terminate_and_wait)
        out = train(cli, "--steps", "5", "--mirror", "m")
    assert "SIGTERM: the process ends as soon as step 5 is copied." in out
    assert "mirror: waiting until step 5 is copied to m/a; press Ctrl-C to stop waiting." in out
    assert "mirror: 0.0 of 0.0 MB" in out
    assert list_saved_steps(Path("m/a/ckpt")) == [5]

    lose_machine()
    shutil.rmtree("m")
    is_free.clear()

    def press_ctrl_c(console: Any, text: str) -> None:
        say(console, text)
        if "mirror: waiting until" in text:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Console, "say", press_ctrl_c)
    out = train(cli, "--steps", "5", "--mirror", "m")
    assert "warning: mirror: the copy to m/a was interrupted" in out
    assert list_saved_steps(Path("runs/a/ckpt")) == [5]
    assert list_saved_steps(Path("m/a/ckpt")) == []
    is_free.set()
    for thread in threading.enumerate():
        if thread.name == "mirror":  # It must end before the next test changes the folder.
            thread.join(60)


# ---- Processes that are killed -------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder with a file system of 100 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=False)


def fill(path: Path) -> None:
    """Writes to a file until writing fails."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


@pytest.mark.slow
def test_mirror_out_of_space_keeps_what_it_has(cli: Cli, tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "callbacks.py").write_text(HOOKS)
    (tmp_path / "config.yaml").write_text(f"mirror: {small_disk}\n")
    train(cli, "--steps", "5")
    assert list_saved_steps(small_disk / "a/ckpt") == [5]
    with pytest.raises(OSError, match="No space"):
        fill(small_disk / "fill")
    out = train(cli, "--steps", "20")
    assert out.count("No space left on device") == 1, out
    assert f"could not be copied to {small_disk}/a: 3." in out
    lose_machine()
    (small_disk / "fill").unlink()
    out = train(cli, "--steps", "10")
    assert "resuming at step 5" in out
    assert list_saved_steps(small_disk / "a/ckpt") == [10, 5]


def start(folder: Path, *flags: str, **how: Any) -> subprocess.Popen[bytes]:
    """Starts training with a mirror in a separate process."""
    command = engine.command_line(*FLAGS, "--mirror=m", "--deterministic", *flags)
    with (folder / "log").open("ab") as log:
        how = {"stdout": log, "stderr": log, **how}
        return subprocess.Popen(command, cwd=folder, env=engine.environment(), **how)


@pytest.mark.slow
def test_machine_is_lost_again_and_again(tmp_path: Path) -> None:
    """A run that loses its machine during copies and fetches equals an uninterrupted run."""
    (tmp_path / "callbacks.py").write_text(PAUSING)
    runs, there = tmp_path / "runs", tmp_path / "m" / "a" / "ckpt"
    flags = ["--steps=40", "--hparams.pause=0.05"]
    assert start(tmp_path, "--mirror=null", "--steps=40").wait(600) == 0
    runs.rename(tmp_path / "whole")

    def list_begun() -> list[int]:
        """Returns the steps of the mirror's checkpoints, even of those that have no record yet."""
        return [int(path.stem.partition("-")[2]) for path in there.glob("ckpt-*.index")]

    for step in (10, 20, 30):
        process = start(tmp_path, *flags)
        wait_until_or_ended(lambda: max(list_begun(), default=0) >= step, process)  # noqa: B023
        process.kill()
        process.wait()
        shutil.rmtree(runs)
        process = start(tmp_path, *flags)
        wait_until_or_ended((runs / "a" / mirror.STAGING).exists, process)
        process.kill()
        process.wait()
    assert start(tmp_path, *flags).wait(600) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().count("resuming at step") >= 3
    assert_same_run(runs / "a", tmp_path / "whole" / "a", 40)
    assert list_saved_steps(there)[0] == 40


@pytest.mark.cluster
def test_cluster_that_loses_its_machines(tmp_path: Path) -> None:
    """The chief fetches the run while the other process waits.

    The cluster is started with TF_CONFIG at first and with ``--workers`` later.
    """
    (tmp_path / "callbacks.py").write_text(PAUSING)
    runs = tmp_path / "runs"
    words = [*FLAGS, "--deterministic"]

    def train_cluster(*flags: str) -> None:
        with (tmp_path / "log").open("ab") as log:
            command = engine.command_line(*words, *flags)
            both = engine.start_cluster(command, tmp_path, stdout=log, stderr=log)
            codes = [process.wait(timeout=600) for process in both]
        assert codes == [0, 0], (tmp_path / "log").read_text()

    train_cluster("--steps=20")
    runs.rename(tmp_path / "whole")
    train_cluster("--steps=10", "--mirror=m")
    shutil.rmtree(runs)
    train_cluster("--steps=15", "--mirror=m")
    shutil.rmtree(runs)
    assert start(tmp_path, "--steps=20", "--workers=2").wait(600) == 0
    log = (tmp_path / "log").read_text()
    assert log.count("fetching the checkpoint") == 2
    assert "resuming at step 10" in log
    assert "resuming at step 15" in log
    assert_same_run(runs / "a", tmp_path / "whole" / "a", 20)
    assert json.loads((runs / "a/metrics.jsonl").read_text().splitlines()[0])["step"] == 1
