"""Tests of paths that a library or a shell would interpret, rather than take as they are."""

import os
from pathlib import Path
from typing import Any

import pytest

import ctl_core
from tests.golden import small
from tests.helpers.cases import make_hooks
from tests.helpers.project import Cli, Train, refused

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
    assert not Path(name).exists() and not Path("m").exists()
    project = tmp_path / name
    project.mkdir()
    (project / "callbacks.py").write_text(small.CALLBACKS)
    monkeypatch.chdir(project)
    before = small.read_files(project)
    refused(cli(None, *flags, command=["train"]), "runs_dir: ", *words)
    assert small.read_files(project) == before and not (project / "runs").exists()


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
