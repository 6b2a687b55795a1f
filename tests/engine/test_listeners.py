"""What a run says: who hears what of it and when, and that no listener ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from tensorboard.plugins.hparams import plugin_data_pb2

import ctl_core
from tests.helpers.cases import assert_weights, make_hooks
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
"""


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


def hooks_that_report(**more: Any) -> SimpleNamespace:
    return make_hooks(every_steps={2: lambda step, loss: ctl_core.report(step, loss=loss)}, **more)


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

    for hook, how in ((fail, "failed"), (stop, "ended"), (kill, "stopped")):
        heard = Heard()
        try:
            listening(make_hooks(at_step={3: hook}), tmp_path, heard, run_name=how)
        except ctl_core.RunError:
            assert hook is fail
        assert heard.calls[-1] == ("end", 3, how)


@pytest.mark.parametrize("method", ["start", "values", "saved", "end"])
def test_one_that_raises_is_warned_of_once_and_ends_nothing(
    method: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raised: list[Any] = []

    def fail(*values: Any) -> None:
        raised.append(values)
        raise SystemExit(3) if method == "values" else ValueError("no such run")

    raising, heard = ctl_core.Listener(), Heard()
    setattr(raising, method, fail)
    state = listening(hooks_that_report(), tmp_path, raising, heard)
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "listener" in line]
    assert said.startswith("warning: listener: ctl_core.run.listeners.Listener: ")
    assert said.endswith("; training goes on without it.")
    assert len(raised) == 1 and heard.calls[-1] == ("end", 6, "done")
    alone = train(hooks_that_report(), steps=6, learning_rate=state.config.learning_rate)
    assert_weights(state, alone, rtol=0)
    assert "Traceback" in (tmp_path / "runs" / "run" / "train.log").read_text()


@pytest.fixture
def own(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A project with listeners in files of its own."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "lacking.py").write_text("import a_service_that_is_not_there\n")
    for name in ("own", "lacking"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return cli


def read_lines(file: str) -> list[Any]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_one_that_the_settings_name_hears_what_metrics_jsonl_holds(own: Cli) -> None:
    source = EVALUATED.replace("{}", "{5: lambda step, loss: ctl_core.report(step, loss=loss)}")
    flags = ("--eval-every", "5", "--seed", "3")
    Path("config.yaml").write_text("listener: own.Notes\n")
    assert own(source, *flags).code == 0
    start, *values, end = read_lines("runs/a/notes")
    assert start == ["start", "a", 3, 0] and end == ["end", 10, "done"] and len(values) == 4
    lines = read_lines("runs/a/metrics.jsonl")
    assert values == [["values", one.pop("step"), one.pop("split"), one] for one in lines]
    assert own(None, "--steps", "12").code == 0, "the run's own settings have it"
    assert read_lines("runs/a/notes")[6] == ["start", "a", 3, 10]


@pytest.mark.parametrize("name", ["own.Note", "own.Path", "lacking.Any"])
@pytest.mark.parametrize("more", [(), ("--check",)])
def test_what_cannot_be_one_is_refused_before_there_is_a_run(
    name: str, more: tuple[str, ...], own: Cli
) -> None:
    refused(own(source_of(), "--listener", name, *more), f"error: listener: {name}")
    assert not Path("runs").exists()


@pytest.mark.cluster
def test_in_a_cluster_the_chief_alone_is_heard(tmp_path: Path) -> None:
    (tmp_path / "callbacks.py").write_text(EVALUATED)
    (tmp_path / "own.py").write_text(OWN)
    words = "train --run-name a --steps 10 --batch-size 8 --workers 2 --listener own.Notes"
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "ctl_core", *words.split()]
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    calls = [call[:3] for call in read_lines(str(tmp_path / "runs" / "a" / "notes"))]
    assert calls == [["start", "a", 0], ["values", 10, "eval"], ["end", 10, "done"]]


def test_metrics_that_cannot_be_written_end_no_training(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = train(make_hooks(), steps=2).run_dir / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    assert train(make_hooks(), steps=4).step == 4
    assert "metrics.jsonl" in capsys.readouterr().out


# ---- TensorBoard's HParams page ------------------------------------------------------------------


def read_settings(run: Path) -> Any:
    """Returns what the only file for the page says of a run's settings."""
    (file,) = Path(run, "tb").glob("*.hparams")
    starts = []
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            content = value.metadata.plugin_data.content
            data = plugin_data_pb2.HParamsPluginData.FromString(content)
            starts.append(data.session_start_info)
    (start,) = starts
    assert start.group_name == run.name
    return start.hparams


def test_the_hparams_page_has_the_last_settings_of_a_run(train: Train) -> None:
    """What all runs have, and what is not the default."""
    settings = {"run_name": "a", "hparams": {"width": 8, "of": {"kinds": ["a"]}}}
    train(make_hooks(), steps=2, **settings)
    values = read_settings(train(make_hooks(), steps=4, ema=0.9, **settings).run_dir)
    common = {"batch_size", "learning_rate", "lr_schedule", "warmup", "steps", "seed"}
    assert {*values} == {*common, "ema", "hparams.width", "hparams.of.kinds"}
    assert values["steps"].number_value == 4 and values["hparams.width"].number_value == 8
    assert values["hparams.of.kinds"].string_value == '["a"]'


# ---- training_log.md -----------------------------------------------------------------------------

LOG = Path("training_log.md")
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d"
STOPPED = """
import signal

every_steps = {6: lambda step: signal.raise_signal(signal.SIGINT)}


def create_eval_dataset(per_replica_batch_size):
    return data.batch(per_replica_batch_size)
"""


def test_an_entry_at_the_start_and_a_line_at_each_end(cli: Cli) -> None:
    """What the user has written between stays; the same note again is the same entry."""
    source = source_of(every_steps=STOPPED)
    assert cli(source, "--eval-every", "4", "--note", "wider\nhelps").code == 130
    text = LOG.read_text()
    expected = (
        "# Training log\n\n## runs/a\n\n- Expected: wider helps\n"
        rf"- Settings: steps 10, batch_size 8, eval_every 4\n- {TIME}: begins, no commit\n"
        rf"- {TIME}: runs/a stopped at step 6; evaluation of step 4: loss \S+\n"
    )
    assert re.fullmatch(expected, text), text
    LOG.write_text(f"{text}\nMy own words.\n")
    assert cli(None, "--note", "wider helps", "--steps", "8").code == 0
    again = LOG.read_text().removeprefix(f"{text}\nMy own words.\n")
    expected = rf"- {TIME}: runs/a done at step 8; evaluation: loss \S+\n"
    assert re.fullmatch(expected, again), again
    assert cli(None, "--steps", "9", "--note", "longer, too").code == 0
    assert LOG.read_text().count("\n## runs/a\n") == 2


def test_no_entry_without_a_note_and_a_failure_is_a_result(cli: Cli) -> None:
    assert cli(source_of(), "--run-name", "b").code == 0
    assert not LOG.exists()
    failing = "def fail(step):\n    raise ValueError('enough')\n\n\nevery_steps = {5: fail}\n"
    assert cli(source_of(every_steps=failing), "--note", "x").code == 1
    assert LOG.read_text().endswith("runs/a failed at step 5\n")
