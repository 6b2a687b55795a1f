"""Tests of a run's files: links, hooks in other files, the kept copy, and ``evaluate --watch``."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from ctl_core.__main__ import main
from ctl_core.commands import use
from ctl_core.session.provenance import list_packages
from tests.golden import compare, small
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import EVALUATED
from tests.helpers.waiting import wait_until

BASE = small.CALLBACKS + "create_eval_dataset = create_dataset\n"
FLAGS = ("--steps", "4", "--batch-size", "16", "--learning-rate", "0.1")
# Hooks with half the loss. They import a module of their own folder and a module of the project.
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
    """Returns a project whose experiments/gan.py imports modules of two folders."""
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
    """Returns a function that runs a command like a new process and returns its output."""

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
    """A run resumes although its folders are links and a hook changes the working directory."""
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
    assert (project / "here.npz").exists()
    assert before == sorted(os.listdir("experiments"))
    assert all((project / place).is_symlink() for place in places)
    assert_trained("a", step=6)


def test_a_worker_that_is_started_again_reports_an_edit(
    project: Path, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor starts its workers again after a crash, possibly after an edit of the hooks.

    https://github.com/facebookresearch/mmf/issues/355
    """
    ctl("train", "--run-name", "a", *FLAGS)
    (project / "callbacks.py").write_text(f"{BASE}# edited\n")
    monkeypatch.setattr("ctl_core.cluster.supervisor.die_with_supervisor", lambda: True)
    out = ctl("train", "--run-name", "a", "--steps", "6")
    assert out.count("callbacks.py has changed since the run was trained; the run continues") == 1


@pytest.mark.slow
def test_changed_or_missing_callbacks_file_is_reported(
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
    assert out.count(f"{' '.join(copy)} uses the old one") == 1
    assert value.group() not in out
    out = ctl("evaluate", *copy)
    assert value.group() in out
    assert "has changed since" not in out
    shutil.copytree("runs/gan", "runs/on")
    out = ctl("train", "--run-name", "on", "--steps", "5")
    assert out.count("the run continues with the current file") == 1
    gan.unlink()
    shutil.rmtree("runs/on")
    monkeypatch.chdir(project.parent)  # The next line moves the project.
    monkeypatch.chdir(project.rename(project.parent / "moved"))
    sys.path[:] = [path for path in sys.path if "/project" not in path]
    assert main(["evaluate"]) == 2
    assert f"; {copy[1]} is the file with which the run was trained" in capsys.readouterr().err
    assert value.group() in ctl("evaluate", *copy)
    ctl("train", "--run-name", "gan", "--steps", "5", *copy)
    assert_trained("gan", 0.5, 5)
    assert Path("runs/gan/callbacks.py").read_text() == HALF


# ---- evaluate --watch: evaluates each checkpoint of a run until the run ends ---------------------

CONFIG = "steps: 8\nbatch_size: 16\nckpt_every: 2\neval_every: 2\n"


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a project with a run that has ended, with checkpoints of steps 2, 4, 6 and 8."""
    (tmp_path / "callbacks.py").write_text(EVALUATED)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(use, "POLL", 0.05)
    monkeypatch.setattr(use, "GRACE", 0.5)
    assert main(["train", "--run-name", "a"]) == 0
    return tmp_path


def lines(run: str, name: str = "watch.jsonl", split: str = "watch") -> list[dict[str, Any]]:
    text = Path("runs", run, name).read_text()
    return [line for line in map(json.loads, text.splitlines()) if line.pop("split") == split]


def tags(folder: str) -> list[tuple[int, str]]:
    (file,) = Path(folder).glob("events*")
    events = tf.compat.v1.train.summary_iterator(str(file))
    return [(event.step, value.tag) for event in events for value in event.summary.value]


def close(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return actual == [pytest.approx(line, rel=1e-6) for line in expected]


@pytest.mark.usefixtures("watched")
def test_an_ended_run_is_evaluated_from_its_first_checkpoint_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["evaluate", "--watch"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "runs/a: watching; the values go to runs/a/watch.jsonl."
    assert [line.split("  ")[0] for line in printed[1:-1]] == [
        "step 2",
        "step 4",
        "step 6",
        "step 8",
    ]
    assert all(line.split("  ")[1].startswith("eval: loss ") for line in printed[1:-1])
    assert printed[-1] == "runs/a: has ended; checkpoints evaluated: 4."
    assert close(lines("a"), lines("a", "metrics.jsonl", "eval"))
    assert tags("runs/a/tb/watch") == [(n, t) for n in (2, 4, 6, 8) for t in ("loss", "error")]
    assert {path: path.read_bytes() for path in before} == before
    new = {str(path) for path in Path("runs").rglob("*") if path.is_file()} - set(map(str, before))
    assert {name.split("/events")[0] for name in new} == {"runs/a/watch.jsonl", "runs/a/tb/watch"}
    assert main(["evaluate", "--watch"]) == 0  # This command finds no new checkpoint.
    assert capsys.readouterr().out.endswith("has ended; checkpoints evaluated: 0.\n")


SLOW_STEPS = """
import time


def pause():
    time.sleep(0.02)


every_steps = {1: pause}
"""


def wait_for(file: str, process: subprocess.Popen[str]) -> None:
    """Waits until a process has written a file, which it must do before it ends."""
    path = Path(file)
    wait_until(lambda: path.exists() or process.poll() is not None, seconds=120)
    assert path.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("watched")
def test_a_run_of_another_process_that_is_killed_and_started_again() -> None:
    Path("callbacks.py").write_text(EVALUATED + SLOW_STEPS)
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    flags = ["--run-name", "live", "--steps", "300", "--ckpt-every", "20"]

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ctl_core", *words]
        return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE)

    trainer = start("train", *flags)
    wait_for("runs/live/config.yaml", trainer)
    watcher = start("evaluate", "--watch", "--run-name", "live")
    wait_for("runs/live/ckpt/engine/ckpt-40.json", trainer)
    trainer.kill()
    trainer.wait()
    trainer = start("train", *flags)
    assert trainer.wait(600) == 0
    out, _ = watcher.communicate(timeout=600)
    assert watcher.returncode == 0
    assert "live: has ended; checkpoints evaluated: " in out
    assert [line["step"] for line in lines("live")] == list(range(20, 301, 20))
    expected = {line["step"]: line for line in lines("live", "metrics.jsonl", "eval")}
    assert close(lines("live"), [expected[step] for step in range(20, 301, 20)])


def test_requirements_leave_out_what_an_environment_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools such as pip are left out, and so are packages that are installed from a folder.

    A package index does not have the version that is installed from a folder.
    """
    packages = tmp_path / "site-packages"
    installed = "numpy-2.3.1 pip-25.3 setuptools-80.9.0 wheel-0.45.1 pip_tools-7.5.0 mine-0.1.0"
    for name in installed.split():
        (packages / f"{name}.dist-info").mkdir(parents=True)
    (packages / "mine-0.1.0.dist-info" / "direct_url.json").touch()
    monkeypatch.setattr(sys, "path", [str(packages), str(tmp_path)])
    assert list_packages().splitlines()[1:] == ["numpy==2.3.1", "pip_tools==7.5.0"]
