"""Several experiments in one project: ``--callbacks FILE``, and the copy that each run keeps."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ctl_core.__main__ import main
from tests.golden import compare
from tests.helpers.experiments import BASE, FLAGS, by_hand, weights

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


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with callbacks.py and experiments/gan.py, which needs modules of both folders."""
    project = tmp_path / "project"
    (project / "experiments").mkdir(parents=True)
    (project / "callbacks.py").write_text(BASE)
    (project / "shared.py").write_text("HALF = 0.5\n")
    (project / "experiments/gan.py").write_text(HALF)
    beside = "from tests.helpers.cases import squared_error as loss\n"
    (project / "experiments/beside.py").write_text(beside)
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return project


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns what runs a command as another process would, and gives what it prints."""

    def run(*argv: str) -> str:
        for name in ("callbacks", "ctl_callbacks", "beside", "shared"):
            sys.modules.pop(name, None)
        assert main([*argv]) == 0
        return capsys.readouterr().out

    return run


def assert_trained(run: str, factor: float, step: int = 4) -> None:
    compare.assert_close(weights(run, step), by_hand(factor, step))


def test_another_file_is_trained_evaluated_and_resumed(
    project: Path, ctl: Callable[..., str]
) -> None:
    ctl("train", "--run-name", "base", *FLAGS)
    ctl("train", "--run-name", "gan", "--callbacks", "experiments/gan.py", *FLAGS)
    assert_trained("base", 1.0)
    assert_trained("gan", 0.5)
    assert Path("runs/gan/callbacks.py").read_text() == HALF
    for command in ("evaluate", "predict", "export"):
        ctl(command, "--run-name", "gan")
    assert "not as it was" not in ctl("train", "--run-name", "gan", "--steps", "5")
    assert_trained("gan", 0.5, 5)


def test_a_file_that_has_changed_or_gone_is_said_and_its_copy_takes_its_place(
    project: Path,
    ctl: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gan = project / "experiments/gan.py"
    copy = ("--callbacks", "runs/gan/callbacks.py")
    ctl("train", "--run-name", "gan", "--callbacks", str(gan), *FLAGS)
    value = re.search(r"loss \S+", ctl("evaluate"))
    assert value
    gan.write_text(HALF.replace("HALF *", "3 *"))
    out = ctl("evaluate")
    assert out.count(f"{' '.join(copy)} takes what it was") == 1 and value.group() not in out
    out = ctl("evaluate", *copy)
    assert value.group() in out and "not as it was" not in out
    shutil.copytree("runs/gan", "runs/on")
    for steps, said in (("5", 1), ("6", 0)):  # once: then the run has been trained with it
        out = ctl("train", "--run-name", "on", "--steps", steps)
        assert out.count("the run goes on with what it is now") == said
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
