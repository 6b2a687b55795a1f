"""Tests of paths that a library or a shell would interpret, rather than take as they are."""

import os
from pathlib import Path
from typing import Any

import pytest

import ctl_core
from tests.golden import small
from tests.helpers.cases import make_hooks
from tests.helpers.project import EVALUATED, Cli, Train, refused

PATTERNS = ["exp?", "ex*", "ex[12]p", "x [x]", "back\\slash"]


@pytest.mark.parametrize("name", PATTERNS)
def test_folder_whose_name_is_a_pattern_is_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """TensorFlow would delete the checkpoints of other runs, whose paths the pattern matches.

    The folder may be that of the runs, or that of the project. Nothing is written in either case.
    """
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    words = ("takes it for a pattern", "choose another one")
    flags = ["--steps=4", "--run-name=a"]
    for more in ([], ["--mirror=m"], ["--workers=2"], ["--background"], ["--check"]):
        outcome = cli(None, *flags, "--runs-dir", name, *more, command=["train"])
        refused(outcome, "runs_dir: ", *words)
    assert not Path(name).exists()
    assert not Path("m").exists()
    project = tmp_path / name
    project.mkdir()
    (project / "callbacks.py").write_text(small.CALLBACKS)
    monkeypatch.chdir(project)
    before = small.read_files(project)
    refused(cli(None, *flags, command=["train"]), "runs_dir: ", *words)
    assert small.read_files(project) == before
    assert not (project / "runs").exists()


def test_runs_in_such_a_folder_are_neither_read_nor_called_damaged(
    train: Train, tmp_path: Path
) -> None:
    train(make_hooks(), steps=2)
    (tmp_path / "[x]").mkdir()
    source = tmp_path / "[x]" / "a"
    os.rename(tmp_path / "runs" / "run", source)
    before = small.read_files(source)
    settings: list[dict[str, Any]] = [
        {"fork": str(source)},
        {"init_from": str(source)},
        {"runs": source.parent, "run_name": "a"},
    ]
    for setting in settings:
        with pytest.raises(ctl_core.SetupError, match=r"\[x\]\S* contains '\['"):
            train(make_hooks(), **{"run_name": "b", "steps": 4, **setting})
    with pytest.raises(ctl_core.SetupError, match=r"\[x\]\S* contains '\['"):
        ctl_core.load(source, callbacks=make_hooks())
    assert small.read_files(source) == before


def test_folders_of_outputs_are_created_or_refused_before_the_work(
    cli: Cli, tmp_path: Path
) -> None:
    """Not even root may write to /proc."""
    (tmp_path / "callbacks.py").write_text(EVALUATED)
    assert cli(None).code == 0
    assert cli(None, command=["predict", "a", "--output=new/results/x.npz"]).code == 0
    assert (tmp_path / "new/results/x.npz").is_file()
    assert cli(None, command=["export", "a", "--output=models/mine"]).code == 0
    assert (tmp_path / "models/mine/1/saved_model.pb").is_file()
    refused(cli(None, command=["predict", "a", "--output=/proc/x.npz"]), "output: /proc")
    refused(cli(None, command=["predict", "a", "--output=/proc/x/y.npz"]), "output: /proc/x")
    (tmp_path / "folder.npz").mkdir()
    refused(cli(None, command=["predict", "a", "--output=folder.npz"]), "is a folder")
    refused(cli(None, command=["export", "a", "--output=/proc/models"]), "output: /proc/mod")
    for more in ([], ["--workers=2"], ["--background"], [f"--mirror={tmp_path}/m"]):
        outcome = cli(None, "--runs-dir=/proc/runs", *more)
        refused(outcome, "runs_dir: /proc/runs/a cannot be written")
