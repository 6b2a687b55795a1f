"""Trackers: what a user's own gets of a run, and what is refused.

tests/on_trackers tries ours, each with its own package.
"""

from __future__ import annotations

import importlib
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.trackers import sender
from ctl_core.trackers.base import Status, Tracked
from ctl_core.trackers.events import Pictures, sizes_in
from ctl_core.trackers.sent import Left, Sent
from tests.helpers.project import Cli, line_of, refused, source_of

# A user's tracker: a file with a line for each call; it fails as its environment says.
OWN = """
import json
import os
from pathlib import Path

from ctl_core.trackers.base import Refused


class Notes:
    where = "notes.jsonl"

    def note(self, *what):
        with Path("notes.jsonl").open("a") as file:
            file.write(json.dumps(what) + chr(10))

    def start(self, config, run):
        if os.environ.get("REFUSED"):
            raise Refused("own.Notes: no login; set NOTES_KEY")
        if os.environ.get("UNREACHABLE"):
            raise ConnectionError("nobody answers")
        print("a line that nobody wants to see")
        self.id = run.id or f"id-{len(list(Path.cwd().glob('started-*')))}"
        Path(f"started-{self.id}").touch()
        env = [run.env["host"] != "", run.env["versions"]["ctl_core"]]
        self.note("start", self.id, run.name, run.step, config["learning_rate"], run.note, env)
        return self.id

    def log(self, step, split, values):
        if os.environ.get("FULL") and step > 4:
            raise OSError("no space left")
        self.note("log", self.id, step, split, values)

    def image(self, step, name, png):
        self.note("image", self.id, step, name, len(png))

    def finish(self, status):
        self.note("finish", self.id, status.how, status.step, dict(status.metrics))


class Empty:
    pass
"""
WATCHED = """\
import os


def look(step, loss):
    ctl_core.report(step, loss=loss)
    if os.environ.get("FAILS_AT") == str(step):
        raise ValueError("a hook that fails")


def draw(step, batch):
    ctl_core.image(step, "host", np.full((4, 6), step / 10))


def input_pre(batch):
    with tf.summary.record_if(tf.summary.experimental.get_step() % 5 == 0):
        tf.summary.image("graph", tf.ones([2, 3, 3, 1]), max_outputs=2)
    return batch[0]


every_steps = {1: look, 5: draw}
"""
EVALUATED = """\
def create_eval_dataset(per_replica_batch_size):
    return data.batch(per_replica_batch_size)
"""
SOURCE = source_of(every_steps=WATCHED, more=EVALUATED)
TRACKED = ("--trackers", "own.Notes", "--ckpt-every", "4", "--eval-every", "5")


@pytest.fixture
def own(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A project with a tracker of its own."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("class Notes:\n    pass\n1 / 0\n")
    monkeypatch.setattr(sender, "END", 60.0)
    return cli


def notes(kind: str) -> list[list[Any]]:
    path = Path("notes.jsonl")
    found = map(json.loads, path.read_text().splitlines() if path.is_file() else ())
    return [rest for first, *rest in found if first == kind]


def logged(name: str, progress: bool = False) -> list[dict[str, Any]]:
    """What was logged of metrics.jsonl, or of progress.jsonl, under an id."""
    return [
        {"step": step, "split": split, **values}
        for by, step, split, values in notes("log")
        if by == name and (split == "progress") == progress
    ]


def written(run: str = "a") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs", run, "metrics.jsonl").open()]


def progress(run: str = "a") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs", run, "progress.jsonl").open()]


def test_a_run_is_logged_once_though_it_fails_goes_on_and_is_begun_anew(
    own: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure at step 7 loses the steps since the checkpoint of step 4."""
    monkeypatch.setenv("FAILS_AT", "7")
    outcome = own(SOURCE, *TRACKED, "--note", "goes well")
    assert outcome.code == 1 and "a hook that fails" in outcome.err
    assert "own.Notes: notes.jsonl\n" in outcome.out
    assert "nobody wants" not in outcome.out + outcome.err
    assert "nobody wants" in Path("runs/a/trackers/own.Notes.log").read_text()
    version = ctl_core.__version__
    assert notes("start") == [["id-0", "a", 0, 0.001, "goes well", [True, version]]]
    assert [line["step"] for line in logged("id-0")] == [1, 2, 3, 4, 5, 5, 6, 7]
    assert notes("finish") == [["id-0", "failed", 7, {}]]

    monkeypatch.delenv("FAILS_AT")
    outcome = own(None, *TRACKED)
    assert (outcome.code, outcome.err) == (0, "")
    assert notes("start")[1][:3] == ["id-0", "a", 4]
    assert logged("id-0") == written()
    assert [line["step"] for line in written()] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]
    pictures = [(step, name) for _, step, name, size in notes("image") if size > 60]
    names = ("train/graph/0", "train/graph/1", "train/host")
    assert sorted(pictures) == [(step, name) for step in (5, 10) for name in names]
    assert notes("finish")[1][:3] == ["id-0", "done", 10]
    rates = [(line["step"], line["learning_rate"]) for line in logged("id-0", progress=True)]
    assert rates == sorted(set(rates)) and {rate for _, rate in rates} == {0.001}
    assert {step for step, _ in rates} >= {x["step"] for x in progress() if x["step"] > 7} >= {10}
    metrics = written()[-1]
    assert notes("finish")[1][3] == {"loss": metrics["loss"]}

    outcome = own(None, command=("track", "--run-name", "a"))
    assert (outcome.code, outcome.out) == (0, "own.Notes: has everything already\n")
    assert len(notes("start")) == 2
    outcome = own(None, command=("track", "--to", "own.Notes", "--anew"))
    assert outcome.code == 0 and outcome.out.endswith("own.Notes: 12 lines and 6 pictures sent.\n")
    assert logged("id-1") == written()
    assert notes("finish")[2][:3] == ["id-1", "done", 10]


def test_other_settings_after_a_failure_begin_a_new_run_there(
    own: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS_AT", "7")
    assert own(SOURCE, *TRACKED).code == 1
    monkeypatch.delenv("FAILS_AT")
    outcome = own(None, *TRACKED, "--learning-rate", "0.01")
    assert outcome.code == 0 and "the run begins anew there, and id-0 stays" in outcome.out
    assert [line["step"] for line in logged("id-0")] == [1, 2, 3, 4, 5, 5, 6, 7]
    assert logged("id-1") == written()


def test_what_fails_there_is_one_warning_and_is_sent_later(
    own: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULL", "1")
    outcome = own(SOURCE, *TRACKED)
    said = [line for line in outcome.out.splitlines() if line.startswith("warning: own")]
    assert outcome.code == 0 and len(said) == 2, outcome
    line = line_of(OWN, "no space left")
    assert f"OSError: no space left (own.py:{line}); training is not affected" in said[0]
    log = Path("runs/a/trackers/own.Notes.log").read_text()
    assert log.count("Traceback") == 1 and f'own.py", line {line}, in log' in log
    assert "track --run-name a --to own.Notes sends the rest" in said[1]
    assert len(logged("id-0")) == 4
    assert own(None, command=("track",)).code == 1
    monkeypatch.delenv("FULL")
    assert own(None, command=("track",)).code == 0
    assert logged("id-0") == written()

    monkeypatch.setenv("UNREACHABLE", "1")
    outcome = own(None, *TRACKED, "--run-name", "b")
    assert outcome.code == 0 and outcome.out.count("nobody answers") == 1
    assert outcome.out.count("warning: own.Notes") == 2
    monkeypatch.delenv("UNREACHABLE")
    assert own(None, command=("track", "--run-name", "b")).code == 0
    assert logged("id-1") == written("b")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wandbb", "unknown tracker 'wandbb'; did you mean 'wandb'?"),
        ("wandb,wandb", "trackers: expected names of trackers, each once"),
        ("own.Nothing", "has no attribute 'Nothing'"),
        ("owner.Notes", "owner.Notes: ModuleNotFoundError: No module named 'owner'"),
        ("own.Empty", "own.Empty: has no start, log, finish; a tracker has"),
        ("broken.Notes", "broken.Notes: ZeroDivisionError: division by zero (broken.py:3)"),
        ("own.Notes", "trackers: own.Notes: no login; set NOTES_KEY"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_first_step(
    own: Cli, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSED", "1")
    outcome = own(SOURCE, "--trackers", name)
    outcome.written.difference_update({p for p in outcome.written if "/trackers/" in p})
    refused(outcome, words)
    assert Path("runs").exists() == (name == "own.Notes")  # a login is found out by the run
    if name == "own.Notes":
        monkeypatch.delenv("REFUSED")
        assert own(None, *TRACKED).code == 0
        monkeypatch.setenv("REFUSED", "1")
        outcome = own(None, *TRACKED, "--steps", "12")
        assert outcome.code == 0 and "warning: trackers: own.Notes: no login" in outcome.out


@pytest.mark.skipif(find_spec("comet_ml") is not None, reason="comet_ml is installed here")
def test_a_package_that_is_missing_is_refused_with_what_installs_it(own: Cli) -> None:
    words = "comet is not installed; in the project's folder: python -m pip install --editable \"."
    refused(own(SOURCE, "--trackers", "comet"), words)
    refused(own(None, "--trackers", "comet", "--check"), words)
    assert own(SOURCE).code == 0
    refused(own(None, command=("track", "--run-name", "a", "--to", "comet")), words)
    refused(own(None, command=("track", "--run-name", "a")), "was trained without trackers")


def test_runs_are_named_by_words(own: Cli) -> None:
    """One or several, each once, beside the flag for one; none of them where one is wrong."""
    for run in ("a", "b", "c"):
        assert own(SOURCE, "--run-name", run).code == 0
    track = ("track", "--to", "own.Notes")
    refused(own(None, command=(*track, "a", "d")), "run_name: no run 'd' in runs")
    assert not notes("start")
    assert own(None, command=(*track, "b", "a", "b")).code == 0
    assert [run for _, run, *_ in notes("start")] == ["b", "a"]
    assert own(None, command=(*track, "b", "--run-name", "c")).code == 0
    assert [run for _, run, *_ in notes("start")][2:] == ["c"], "all of b has been sent"


def test_a_run_where_nothing_can_be_kept_is_one_line(own: Cli) -> None:
    """Such as one on a disk that is read only."""
    assert own(SOURCE).code == 0
    Path("runs/a/trackers").touch()
    found = own(None, command=("track", "a", "--to", "own.Notes"))
    refused(found, "runs/a/trackers: cannot be written: File exists; log a copy of the run")


def test_a_damaged_line_is_left_out_and_said(own: Cli) -> None:
    assert own(SOURCE).code == 0
    path = Path("runs/a/metrics.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:9], *lines[2:]]) + "\n")
    outcome = own(None, command=("track", "--to", "own.Notes"))
    assert outcome.code == 0 and "metrics.jsonl: 1 line cannot be read, and left out" in outcome.err
    assert logged("id-0") == [json.loads(line) for line in [lines[0], *lines[2:]]]


def steps_sent(sent: Sent, steps: list[int], before: int = 0) -> list[int]:
    """Sends the lines of these steps, of which some are there at the start."""
    lines, left, found = [f"line {step}" for step in steps], Left(sent), []
    left.begin(lines[:before])
    for step, line in list(zip(steps, lines, strict=True))[left.number :]:
        if mark := left.next(line, step):
            sent.add(step, mark)
            found.append(step)
    return found


def test_steps_that_are_taken_again_are_sent_once_however_often_that_happens() -> None:
    sent = Sent()
    assert steps_sent(sent, [1, 2, 2, 3, 4, 4]) == [1, 2, 2, 3, 4, 4]
    assert steps_sent(sent, [1, 2, 2, 3], before=3) == []
    assert steps_sent(sent, [1, 2, 2, 3, 4, 4, 4, 5], before=1) == [4, 5]
    assert steps_sent(sent, [1, 2, 2, 3, 4, 4, 4, 5, 6], before=8) == [6]
    assert steps_sent(sent, [1, 2, 2, 3, 4, 4, 4, 5, 6, 2, 7], before=9) == [2, 7]


def test_pictures_are_those_of_tensorflow_as_they_come(tmp_path: Path) -> None:
    pictures, found = Pictures(tmp_path), []
    pixels = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
    writer = tf.summary.create_file_writer(str(tmp_path / "train"))
    with writer.as_default():
        for step in (1, 2):
            ctl_core.image(step, "several", pixels)
            ctl_core.image(step, "grey", pixels[0, :, :, 0] / 255)
            tf.summary.scalar("images", 1.0, step)
            writer.flush()
            found += pictures.new()
    names = ["train/several/0", "train/several/1", "train/grey"]
    assert [(one.step, one.name) for one in found] == [(s, n) for s in (1, 2) for n in names]
    decoded = [tf.io.decode_png(one.png).numpy() for one in found[:3]]
    np.testing.assert_array_equal(decoded[:2], pixels)
    np.testing.assert_array_equal(decoded[2], pixels[0, :, :, :1])
    (path,) = tmp_path.glob("train/*")
    sizes = sizes_in(tmp_path)
    with writer.as_default():
        ctl_core.image(3, "grey", pixels[0])
        writer.flush()
    later = Pictures(tmp_path)
    assert later.new(sizes) == found and [one.step for one in later.new()] == [3]
    path.write_bytes(path.read_bytes()[:-5])  # cut short by a kill
    assert Pictures(tmp_path).new() == found
    for wrong in (np.zeros(3), np.zeros((2, 2, 5)), np.zeros((2, 2), int), np.zeros((0, 2))):
        with pytest.raises(ValueError, match=r"^image 'x': expected"):
            ctl_core.image(1, "x", wrong)


class MlflowException(Exception):
    """What MLflow raises."""

    def get_http_status_code(self) -> int:
        return 400


class Client:
    """Stands in for MLflow's: takes the names that it takes, and refuses a batch as a whole."""

    known: ClassVar[dict[str, dict[str, Any]]] = {}
    active = True
    short = ""

    def __init__(self, uri: str) -> None:
        pass

    def take(self, kind: str, key: str, value: Any) -> None:
        if kind != "pictures":
            self.check(key)
        elif posixpath.normpath(key) != key or key.startswith("."):
            raise MlflowException(f"Invalid artifact path: '{key}'")
        self.known[kind][key] = value

    def check(self, key: str) -> None:
        """As mlflow.utils.validation does."""
        if not re.match(r"^[/\w.\- :]*$", key) or (self.short and self.short in key):
            raise MlflowException(f"Invalid value \"{key}\" for parameter 'name' supplied: Names")
        if posixpath.normpath(key) != key or key[0] in "./" or len(key) > 250:
            raise MlflowException(f"Invalid name: '{key}'")

    def log_batch(self, run: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        several = {"metrics": metrics, "params": params, "tags": tags}
        for values in several.values():
            for one in values:
                self.check(one.key)
        for kind, values in several.items():
            for one in values:
                self.take(kind, one.key, one.value)

    def log_artifact(self, run: str, path: str, where: str) -> None:
        self.take("pictures", where, Path(path).name)

    def update_run(self, run: str, status: str) -> None:
        if not self.active:
            raise MlflowException("The run must be in the 'active' state.")

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment: str, run_name: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def get_run(self, run: str) -> Any:
        return SimpleNamespace(
            data=SimpleNamespace(**{k: dict(self.known[k]) for k in ("params", "tags")})
        )

    def set_terminated(self, run: str, status: str) -> None:
        self.known["ended"] = {run: status}


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our tracker for MLflow, whose package the stand-in is."""

    def entity(key: str, value: Any, time: int = 0, step: int = 0) -> Any:
        return SimpleNamespace(key=key, value=value, step=step)

    status = SimpleNamespace(to_string=str, from_string=str)
    entities = {"Metric": entity, "Param": entity, "RunTag": entity, "RunStatus": status}
    packages: dict[str, dict[str, Any]] = {
        "sqlalchemy": {},
        "mlflow": {"MlflowClient": Client},
        "mlflow.entities": entities,
        "mlflow.exceptions": {"MlflowException": MlflowException},
    }
    for name, content in packages.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Client, "known", {k: {} for k in ("metrics", "params", "tags", "pictures")})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://nowhere")
    sys.modules.pop("ctl_core.trackers.mlflow", None)
    yield importlib.import_module("ctl_core.trackers.mlflow")
    sys.modules.pop("ctl_core.trackers.mlflow")


def tracked(folder: Path, step: int = 0, id: str | None = None) -> Tracked:
    env = {"host": "h", "versions": {"a+b": "1"}}
    return Tracked("a", folder, "p", id, False, step, "", env)


def test_mlflow_gets_every_setting_value_and_picture_under_a_name_that_it_takes(
    mlflow: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"steps": 300, "hparams": {"a (b)": 1, "a [b]": 2}}
    values = {"acc@1": 1.0, "acc#1": 2.0, "loss (train)": 3.0, "a//b": 4.0, "..": 5.0, "": 6.0}
    values |= {"x" * 300: 7.0, "x" * 301: 8.0, "größe": 9.0}
    tracker = mlflow.Tracker()
    assert tracker.start(settings, tracked(tmp_path)) == "r"
    tracker.log(1, "train", values)
    tracker.flush()
    for name in ("train/a@b", "train/../c", "/d/"):
        tracker.image(1, name, b"png")
    tracker.finish(Status("done", "", 1, {"acc@1": 1.0}))
    known = Client.known
    assert known["params"]["steps"] == "300" and sorted(known["params"].values()) == [
        "1",
        "2",
        "300",
    ]
    assert known["metrics"]["train/acc_1"] == 1.0 and known["metrics"]["final/acc_1"] == 1.0
    assert sorted(known["metrics"].values()) == [1.0, 1.0, *range(2, 10)]
    assert len(known["pictures"]) == 3 and known["ended"] == {"r": "FINISHED"}
    assert known["tags"]["env.versions.a_b"] == "1" and tracker.missed == ""

    for step, steps in ((300, 600), (1000, 600), (1001, 300), (1002, 300)):
        mlflow.Tracker().start(settings | {"steps": steps}, tracked(tmp_path, step, "r"))
    assert known["params"]["steps"] == "300"
    changed = {name: x for name, x in known["tags"].items() if " at " in name}
    assert changed == {"steps at 300": "600", "steps at 1001": "300"}


def test_what_mlflow_refuses_in_spite_of_that_keeps_nothing_else_back(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "short", "odd")
    tracker = mlflow.Tracker()
    tracker.start({"steps": 3, "odd": 1}, tracked(tmp_path))
    tracker.log(1, "train", {"odd": 1.0, "loss": 2.0})
    tracker.flush()
    tracker.finish(Status("done", "", 1, {"odd": 1.0}))
    assert Client.known["params"] == {"steps": "3"} and Client.known["metrics"] == {
        "train/loss": 2.0
    }
    assert tracker.missed.startswith(
        "3 of the values and pictures are refused there: Invalid value"
    )
    monkeypatch.setattr(Client, "active", False)  # a run that was deleted there takes nothing
    tracker.log(2, "train", {"odd": 1.0})
    with pytest.raises(MlflowException, match="active"):
        tracker.flush()
