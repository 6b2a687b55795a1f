"""Run folders that are links, or somebody else's: to read only."""

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


@pytest.mark.parametrize("place", ["runs", "runs/a", "runs/a/ckpt", "runs/a/tb"])
def test_folders_of_a_run_may_be_links(project: Path, place: str) -> None:
    disk = project / "disk"
    (project / place).rename(disk)
    (project / place).symlink_to(disk)
    assert main(["train", "--run-name", "a", "--steps", "6"]) == 0
    assert main(["evaluate"]) == 0
    assert (project / place).is_symlink()
    for one, other in zip(weights("a", 6), by_hand(1.0, 6), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_run_of_somebody_elses_is_used_and_left_as_it_is(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, mine = project / "runs/a", project / "mine"
    (run / "ckpt/checkpoint").unlink()  # TensorFlow's list of checkpoints is not needed to read
    for command in ("evaluate", "predict", "export"):  # imports what they need as root
        assert main([command]) == 0
    shutil.rmtree(run / "export")
    (run / "predictions.npz").unlink()
    mine.mkdir()
    mine.chmod(0o777)
    np.save(mine / "new.npy", regression_data()[0][:7])
    for path in (run, *run.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    before = tree(project / "runs")
    gc.collect()  # what only root may clean up
    root = os.geteuid() == 0
    if root:  # who may write everything
        os.seteuid(NOBODY)
    try:
        assert main(["evaluate"]) == 0
        capsys.readouterr()
        for words in (["predict"], ["export"], ["train", "--run-name", "a", "--steps", "9"]):
            assert main(words) > 0
            error = capsys.readouterr().err
            assert "runs/a" in error and "Permission denied" in error and error.count("\n") == 1
        flags = ["--input", "mine/new.npy", "--output", "mine/out.npz"]
        assert main(["predict", *flags]) == 0
        assert main(["export", "--output", "mine/model"]) == 0
    finally:
        if root:
            os.seteuid(0)
    assert tree(project / "runs") == before
    model = small_model()
    tf.train.Checkpoint(train_model=model).read("runs/a/ckpt/ckpt-4").expect_partial()
    inputs = regression_data()[0][:7]
    served = tf.saved_model.load("mine/model/1")
    for value in (served.serve(inputs), np.load("mine/out.npz")["output"]):
        np.testing.assert_allclose(value, model(inputs), rtol=1e-5, atol=1e-6)
    for path in (run, *run.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
