"""Folders of runs that are links, hooks in another file, and the copy that each run keeps."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from ctl_core.__main__ import main
from tests.golden import compare, small

BASE = small.CALLBACKS + "create_eval_dataset = create_dataset\n"
FLAGS = ("--steps", "4", "--batch-size", "16", "--learning-rate", "0.1")
# Half the loss, by a module beside the file and one of the project's.
HALF = """
from callbacks import *
import beside
from pathlib import Path
from shared import HALF

assert (Path(__file__).parent / "beside.py").exists()


def create_loss():
    return lambda pair: HALF * beside.loss(pair)
"""
Ctl = Callable[..., str]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with callbacks.py and experiments/gan.py, which needs modules of both folders."""
    project = tmp_path / "project"
    (project / "experiments").mkdir(parents=True)
    (project / "callbacks.py").write_text(BASE)
    (project / "shared.py").write_text("HALF = 0.5\n")
    (project / "experiments/gan.py").write_text(HALF)
    beside = "from tests.golden.small import squared_error as loss\n"
    (project / "experiments/beside.py").write_text(beside)
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return project


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str]) -> Ctl:
    """Returns what runs a command as another process would, and gives what it prints."""

    def run(*argv: str) -> str:
        for name in ("callbacks", "ctl_callbacks", "beside", "shared"):
            sys.modules.pop(name, None)
        assert main([*argv]) == 0
        return capsys.readouterr().out

    return run


def read_model(run: str, step: int = 4) -> keras.Model:
    model = small.create_model()
    ckpt = tf.train.Checkpoint(train_model=model)
    ckpt.read(f"runs/{run}/ckpt/ckpt-{step}").expect_partial()
    return model


def assert_trained(run: str, factor: float = 1.0, step: int = 4) -> None:
    expected = small.plain(step, lambda _: 0.1 * factor)
    compare.assert_close(read_model(run, step).weights, expected.weights)


def test_folders_of_a_run_may_be_links_and_hooks_change_the_folder(
    project: Path, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each a link into another disk, from the run's own folders up."""
    ctl("train", "--run-name", "a", *FLAGS)
    places = ["runs/a/tb", "runs/a/ckpt", "runs/a", "runs"]
    for number, place in enumerate(places):
        (disk := project.parent / f"disk-{number}").mkdir()
        (project / place).rename(disk / "there")
        (project / place).symlink_to(disk / "there")
    leave = "import os\n\ndef leave():\n    os.chdir('experiments')\n\nat_step = {5: leave}\n"
    (project / "callbacks.py").write_text(BASE + leave)
    before = sorted(os.listdir("experiments"))
    ctl("train", "--run-name", "a", "--steps", "6")
    monkeypatch.chdir(project)
    ctl("predict", "--output", "here.npz")
    assert (project / "here.npz").exists() and before == sorted(os.listdir("experiments"))
    assert all((project / place).is_symlink() for place in places)
    assert_trained("a", step=6)


def test_another_file_is_used_and_one_that_has_changed_or_gone_is_said(
    project: Path,
    ctl: Ctl,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gan = project / "experiments/gan.py"
    copy = ("--callbacks", "runs/gan/callbacks.py")
    ctl("train", "--run-name", "gan", "--callbacks", str(gan), *FLAGS)
    assert_trained("gan", 0.5)
    assert Path("runs/gan/callbacks.py").read_text() == HALF
    value = re.search(r"loss \S+", ctl("evaluate"))
    assert value
    gan.write_text(HALF.replace("HALF *", "3 *"))
    out = ctl("evaluate")
    assert out.count(f"{' '.join(copy)} takes what it was") == 1 and value.group() not in out
    out = ctl("evaluate", *copy)
    assert value.group() in out and "not as it was" not in out
    shutil.copytree("runs/gan", "runs/on")
    out = ctl("train", "--run-name", "on", "--steps", "5")
    assert out.count("the run goes on with what it is now") == 1
    gan.unlink()
    shutil.rmtree("runs/on")
    monkeypatch.chdir(project.parent)  # and the project has moved
    monkeypatch.chdir(project.rename(project.parent / "moved"))
    sys.path[:] = [path for path in sys.path if "/project" not in path]
    assert main(["evaluate"]) == 2
    assert f"; {copy[1]} is as the run was trained" in capsys.readouterr().err
    assert value.group() in ctl("evaluate", *copy)
    ctl("train", "--run-name", "gan", "--steps", "5", *copy)
    assert_trained("gan", 0.5, 5)
    assert Path("runs/gan/callbacks.py").read_text() == HALF
