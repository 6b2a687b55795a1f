"""Listeners: what they hear of a run, when, and that none of them ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import EVALUATED, Cli, refused, source_of

# A listener in a file of the user's own, which writes what it hears into a file.
OWN = """\
import json
from pathlib import Path

import ctl_core


class Notes(ctl_core.Listener):
    def start(self, folder, config, step):
        self.folder = folder
        self.note("start", folder.name, config["seed"], step)

    def values(self, step, split, values):
        self.note("values", step, split, values)

    def end(self, step, how):
        self.note("end", step, how)

    def note(self, *words):
        with (self.folder / "notes").open("a") as file:
            file.write(json.dumps(words) + chr(10))


class Broken(ctl_core.Listener):
    def values(self, step, split, values):
        raise ConnectionError("nobody answers")  # here


class Other:
    pass
"""


# A project whose loss is reported every fifth step.
REPORTED = EVALUATED.replace(
    "every_steps = {}", "every_steps = {5: lambda step, loss: ctl_core.report(step, loss=loss)}"
)


class Heard(ctl_core.Listener):
    """Keeps what it hears, and what was on the disk then."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        assert (folder / "config.yaml").exists() and (folder / "env.json").exists()
        self.calls.append(("start", folder.name, config["batch_size"], step))

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        self.calls.append((split, step))

    def saved(self, step: int, path: Path) -> None:
        assert (path.parent / "engine" / f"ckpt-{step}.json").exists()
        assert tf.train.load_checkpoint(str(path)).get_variable_to_shape_map()
        self.calls.append(("saved", step))

    def end(self, step: int, how: str) -> None:
        self.calls.append(("end", step, how))


class Raising(ctl_core.Listener):
    """Raises in one of its methods, however that is called."""

    def __init__(self, method: str, error: BaseException) -> None:
        self.raised = 0

        def fail(*values: Any) -> None:
            self.raised += 1
            raise error

        setattr(self, method, fail)


def hooks_that_report(**more: Any) -> SimpleNamespace:
    def look(step: int, loss: Any) -> None:
        ctl_core.report(step, loss=loss)

    return make_hooks(every_steps={2: look}, **more)


def listening(hooks: Any, folder: Path, *listeners: ctl_core.Listener, **settings: Any) -> Any:
    settings = {"steps": 6, "batch_size": 16, "run_name": "run", "ckpt_every": 4, **settings}
    config = ctl_core.Config(runs_dir=str(folder / "runs"), **settings)
    return ctl_core.train(hooks, config, listeners=listeners)


def test_a_run_is_heard_from_its_start_to_its_end(tmp_path: Path) -> None:
    first, second = Heard(), Heard()
    listening(hooks_that_report(), tmp_path, first)
    assert [call for call in first.calls if call[0] != "saved"] == [
        ("start", "run", 16, 0),
        *[("train", 2), ("train", 4), ("train", 6)],
        ("end", 6, "done"),
    ]
    assert [call for call in first.calls if call[0] == "saved"] == [("saved", 4), ("saved", 6)]
    assert first.calls.index(("saved", 4)) > first.calls.index(("train", 4))
    assert first.calls[-1][0] == "end"
    listening(hooks_that_report(), tmp_path, second)
    assert second.calls == [], "there is nothing left to train"
    listening(hooks_that_report(), tmp_path, second, steps=8)
    assert second.calls == [
        ("start", "run", 16, 6),
        *[("train", 8), ("saved", 8), ("end", 8, "done")],
    ]


def test_a_run_that_fails_or_ends_otherwise_says_so(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise ValueError("a hook fails")

    def stop(step: int) -> None:
        raise ctl_core.StopTraining

    def kill(step: int) -> None:
        signal.raise_signal(signal.SIGTERM)

    ends = {}
    for hook in (fail, stop, kill):
        heard = Heard()
        try:
            listening(make_hooks(at_step={3: hook}), tmp_path, heard, run_name=hook.__name__)
        except ctl_core.RunError:
            assert hook is fail
        ends[hook.__name__] = heard.calls[-1]
    assert ends == {
        "fail": ("end", 3, "failed"),
        "stop": ("end", 3, "ended"),
        "kill": ("end", 3, "stopped"),
    }


@pytest.mark.parametrize("method", ["start", "values", "saved", "end"])
@pytest.mark.parametrize("error", [ValueError("no such run"), SystemExit(3)])
def test_one_that_raises_is_warned_of_once_and_ends_nothing(
    method: str,
    error: BaseException,
    train: Train,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raising, heard = Raising(method, error), Heard()
    state = listening(hooks_that_report(), tmp_path, raising, heard)
    said = [line for line in capsys.readouterr().out.splitlines() if "listener" in line]
    assert len(said) == 1 and said[0].startswith("warning: listener: ")
    assert "test_listeners.Raising (test_listeners.py:" in said[0]
    assert said[0].endswith("; training goes on without it.") and type(error).__name__ in said[0]
    assert raising.raised == 1 and heard.calls[-1] == ("end", 6, "done")
    alone = train(hooks_that_report(), steps=6, learning_rate=state.config.learning_rate)
    for ours, theirs in zip(state.train_model.weights, alone.train_model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert "Traceback" in (tmp_path / "runs" / "run" / "train.log").read_text()


@pytest.fixture
def own(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A project with listeners in files of its own."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "lacking.py").write_text("import a_service_that_is_not_there\n")
    for name in ("own", "lacking"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return cli


def notes() -> list[list[Any]]:
    return [json.loads(line) for line in Path("runs/a/notes").read_text().splitlines()]


@pytest.mark.parametrize("name", ["own.Notes", "own:Notes"])
def test_one_is_named_by_the_settings_and_hears_what_metrics_jsonl_holds(
    name: str, own: Cli
) -> None:
    flags = ("--eval-every", "5")
    assert own(REPORTED, *flags, "--seed", "3", config=f"listener: {name}\n").code == 0
    start, *values, end = notes()
    assert start == ["start", "a", 3, 0] and end == ["end", 10, "done"]
    lines = map(json.loads, Path("runs/a/metrics.jsonl").read_text().splitlines())
    assert values == [["values", one.pop("step"), one.pop("split"), one] for one in lines]
    assert len(values) == 4
    assert own(None, "--steps", "12").code == 0, "the run's own settings have it"
    assert notes()[len(values) + 2] == ["start", "a", 3, 10]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own.Note", "listener: own has no class 'Note'; did you mean 'Notes'?"),
        ("own.Other", "listener: own.Other is no class that is made of ctl_core.Listener."),
        (
            "lacking.Any",
            "listener: lacking.Any (lacking.py:1): ModuleNotFoundError: No module",
        ),
    ],
)
def test_what_cannot_be_one_is_refused_before_there_is_a_run(
    name: str, words: str, own: Cli
) -> None:
    for more in ((), ("--check",)):
        outcome = own(source_of(), "--listener", name, *more)
        refused(outcome, words)
        assert not Path("runs").exists()


@pytest.mark.cluster
def test_in_a_cluster_the_chief_alone_is_heard(tmp_path: Path) -> None:
    (tmp_path / "callbacks.py").write_text(EVALUATED)
    (tmp_path / "own.py").write_text(OWN)
    words = "train --run-name a --steps 10 --batch-size 8 --eval-every 5 --workers 2"
    command = [sys.executable, "-m", "ctl_core", *words.split(), "--listener", "own.Notes"]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "-1"}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    text = (tmp_path / "runs" / "a" / "notes").read_text()
    calls = [json.loads(line) for line in text.splitlines()]
    assert [call[:3] for call in calls] == [
        ["start", "a", 0],
        *[["values", step, "eval"] for step in (5, 10)],
        ["end", 10, "done"],
    ]
    wrong = subprocess.run(
        [*command[:-1], "own.Note"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert wrong.returncode == 2 and "own has no class 'Note'" in wrong.stderr
