"""Run folders that somebody else has made: links that lead elsewhere, and folders to read only."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.__main__ import main
from tests.helpers.cases import regression_data, small_model
from tests.helpers.experiments import BASE, FLAGS, by_hand, weights

NOBODY = 65534
KEPT = b"somebody's own"


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file and folder, with inode, size and times: what a write or a rename changes."""
    paths = [folder, *folder.rglob("*")]
    stats = {str(path): path.lstat() for path in paths}
    return {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a trained run, below a folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))
        Path("callbacks.py").write_text(BASE)
        assert main(["train", "--run-name", "a", *FLAGS]) == 0
        yield Path(folder)


@pytest.fixture
def outside(project: Path) -> Path:
    """A file of somebody's and a folder of somebody's, outside of the run."""
    folder = project / "outside"
    folder.mkdir()
    (folder / "file").write_bytes(KEPT)
    return folder


def link(path: Path, target: Path) -> None:
    """Puts a link in the place of what is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


LINKS = {
    "train.log": "file",
    "ckpt": "",
    "ckpt/engine": "",
    "ckpt/ckpt-6.index": "file",
    "tb": "nowhere",
}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_that_leads_out_of_the_run_is_refused(
    project: Path, outside: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    link(project / "runs/a" / name, outside / LINKS[name])
    before = tree(project)
    capsys.readouterr()
    assert main(["train", "--run-name", "a", "--steps", "6"]) == 2
    error = capsys.readouterr().err
    assert f"runs/a/{name}: a symbolic link that leads out of the run folder, to " in error
    assert str((outside / LINKS[name]).resolve()) in error and "remove it, or" in error
    assert error.count("\n") == 1 and tree(project) == before


@pytest.mark.parametrize("place", ["runs", "runs/a"])
def test_the_runs_folder_the_run_and_links_inside_of_it_may_be_links(
    project: Path, place: str
) -> None:
    (project / "runs/a/tb").rename(project / "runs/a/logs")
    (project / "runs/a/tb").symlink_to("logs")
    disk = project / "disk"
    (project / place).rename(disk)
    (project / place).symlink_to(disk)
    assert main(["train", "--run-name", "a", "--steps", "6"]) == 0
    assert main(["evaluate"]) == 0
    run = disk if place == "runs/a" else disk / "a"
    assert (run / "ckpt/ckpt-6.index").exists()
    assert len(list((run / "logs/eval").iterdir())) == 2
    for one, other in zip(weights("a", 6), by_hand(1.0, 6), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_run_of_somebody_elses_is_used_and_left_as_it_is(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = project / "runs/a"
    (run / "ckpt/checkpoint").unlink()  # TensorFlow's list of checkpoints is not needed to read
    commands = ("evaluate", "predict", "export")
    for command in commands:  # imports what they need as who may read all of Python
        assert main([command]) == 0
    shutil.rmtree(run / "export")
    (run / "predictions.npz").unlink()
    mine = project / "mine"
    mine.mkdir(mode=0o777)
    mine.chmod(0o777)
    for path in (run, *run.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    before = tree(project / "runs")
    np.save(mine / "new.npy", regression_data()[0][:7])
    capsys.readouterr()
    gc.collect()  # what only root may clean up
    root = os.geteuid() == 0
    if root:  # who may write everything
        os.seteuid(NOBODY)
    try:
        assert main(["evaluate"]) == 0
        assert "step 4  eval: loss" in capsys.readouterr().out
        for command, name in (("predict", "predictions.npz"), ("export", "export/1")):
            assert main([command]) == 2
            error = capsys.readouterr().err
            assert f"runs/a/{name} cannot be written: Permission denied; name another" in error
            assert error.startswith("error: output: ") and error.count("\n") == 1
        flags = ["--input", "mine/new.npy", "--output", "mine/out.npz"]
        assert main(["predict", *flags]) == 0
        assert main(["export", "--output", "mine/model"]) == 0
        assert main(["train", "--run-name", "a", "--steps", "9"]) == 2
        error = capsys.readouterr().err
        assert "the run folder cannot be written" in error and error.count("\n") == 1
    finally:
        if root:
            os.seteuid(0)
    assert tree(project / "runs") == before
    model = small_model()
    ckpt = tf.train.Checkpoint(train_model=model)
    ckpt.read("runs/a/ckpt/ckpt-4").expect_partial()
    inputs = regression_data()[0][:7]
    served = tf.saved_model.load("mine/model/1")
    for value in (served.serve(inputs), np.load("mine/out.npz")["output"]):
        np.testing.assert_allclose(value, model(inputs), rtol=1e-5, atol=1e-6)
    for path in (run, *run.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)


def test_an_export_replaces_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine").mkdir()
    (project / "mine/notes.txt").write_text("mine")
    (project / "mine/7").mkdir()
    (project / "mine/9.old").mkdir()
    for version in (8, 9):
        assert main(["export", "--output", "mine"]) == 0
        assert tf.saved_model.load(f"mine/{version}")
    assert sorted(os.listdir("mine")) == ["7", "8", "9", "9.old", "notes.txt"]
    before = tree(project)
    capsys.readouterr()
    for flags, words in (
        (["--output", "callbacks.py"], "callbacks.py/1 cannot be written: "),
        (["--output", "not/there"], "cannot be written: No such file or directory; name another"),
        (["--output", ""], "output: expected a path in the file system, got ''"),
    ):
        assert main(["export", *flags]) == 2
        error = capsys.readouterr().err
        assert words in error and error.startswith("error: output: ") and error.count("\n") == 1
    assert tree(project) == before
