"""Several experiments in one project: ``--callbacks FILE``, and the copy that each run keeps."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from ctl_core.__main__ import main
from ctl_core.settings import load_config
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
    for name in [name for name in os.environ if name.startswith("CTL_")]:
        monkeypatch.delenv(name)
    return project


def ctl(*argv: str) -> int:
    """Runs a command as another process would, which has imported none of the project's files."""
    for name in ("callbacks", "ctl_callbacks", "beside", "shared"):
        sys.modules.pop(name, None)
    return main([*argv])


def same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_another_file_is_trained_evaluated_and_resumed_without_renaming(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ctl("train", "--run-name", "base", *FLAGS) == 0
    assert ctl("train", "--run-name", "gan", "--callbacks", "experiments/gan.py", *FLAGS) == 0
    same(weights("base"), by_hand(1.0))
    same(weights("gan"), by_hand(0.5))
    assert load_config("runs/gan/config.yaml").callbacks == "experiments/gan.py"
    assert Path("runs/gan/callbacks.py").read_text() == HALF
    assert Path("runs/base/callbacks.py").read_text() == BASE
    capsys.readouterr()
    for command in ("evaluate", "predict", "export"):
        assert ctl(command, "--run-name", "gan") == 0
    assert ctl("train", "--run-name", "gan", "--steps", "5") == 0
    out = capsys.readouterr().out
    assert "not as it was" not in out and "own settings" not in out
    same(weights("gan", 5), by_hand(0.5, 5))
    Path("config.yaml").write_text("callbacks: ./experiments/gan.py\nsteps: 5\n")
    assert ctl("train", "--run-name", "gan") == 0
    assert "own settings" not in capsys.readouterr().out
    assert ctl("train", "--run-name", "base") == 0
    assert "in config.yaml differ callbacks, steps" in capsys.readouterr().out
    assert ctl("train", "--run-name", "file", *FLAGS) == 0
    Path("config.yaml").unlink()
    monkeypatch.setenv("CTL_CALLBACKS", str(project / "experiments" / "gan.py"))
    assert ctl("train", "--run-name", "variable", *FLAGS) == 0
    for run in ("file", "variable"):
        same(weights(run), by_hand(0.5))
        assert load_config(f"runs/{run}/config.yaml").callbacks == "experiments/gan.py"


def test_a_file_that_has_changed_or_gone_is_said_and_its_copy_is_there(
    project: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gan = project / "experiments/gan.py"
    assert ctl("train", "--run-name", "gan", "--callbacks", str(gan), *FLAGS) == 0
    capsys.readouterr()
    assert ctl("evaluate") == 0
    value = re.search(r"loss \S+", capsys.readouterr().out)
    assert value
    gan.write_text(HALF.replace("HALF *", "3 *"))
    for command in ("predict", "export", "evaluate"):
        assert ctl(command) == 0
        out = capsys.readouterr().out
        assert out.count("--callbacks runs/gan/callbacks.py takes what it was") == 1
        assert value.group() not in out
    assert ctl("evaluate", "--callbacks", "runs/gan/callbacks.py") == 0
    out = capsys.readouterr().out
    assert value.group() in out and "not as it was" not in out
    shutil.copytree("runs/gan", "runs/on")
    for steps, said in (("5", 1), ("6", 0)):  # once: then the run has been trained with it
        assert ctl("train", "--run-name", "on", "--steps", steps) == 0
        assert capsys.readouterr().out.count("the run goes on with what it is now") == said
    shutil.rmtree("runs/on")
    gan.unlink()
    monkeypatch.chdir(tmp_path)  # and the project has moved
    project = project.rename(tmp_path / "moved")
    monkeypatch.chdir(project)
    sys.path[:] = [path for path in sys.path if "/project" not in path]
    assert ctl("evaluate") == 0
    out = capsys.readouterr().out
    assert "experiments/gan.py is not there; the run's copy is used" in out
    assert value.group() in out
    copy = ("--callbacks", "runs/gan/callbacks.py")
    for step, named in ((5, ()), (6, copy)):
        assert ctl("train", "--run-name", "gan", "--steps", str(step), *named) == 0
        same(weights("gan", step), by_hand(0.5, step))
    assert load_config("runs/gan/config.yaml").callbacks == "experiments/gan.py"
    assert Path("runs/gan/callbacks.py").read_text() == HALF
    assert not (project / "runs/gan/__pycache__").exists()
