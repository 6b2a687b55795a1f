"""sweep.py runs trials in parallel, prunes them, and resumes after a stop or a kill.

A package ``ctl_core`` next to sweep.py replaces the engine, because it starts at once.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from ctl_core.commands.cli import parse_command
from tests.helpers.rendering import ROOT
from tests.helpers.waiting import wait_until

FILE = ROOT / "templates" / "sweeps" / "optuna.py"
# The replacement of the engine. It saves at each step and exits with the engine's codes. With a
# learning rate above 1, it waits until it is told to end. Tests set STEPS, PACE (in seconds) and
# FAILS.
TRAINS = """
import json, os, pathlib, signal, sys, time

flags = dict(word[2:].split("=") for word in sys.argv[2:])
folder = pathlib.Path("runs", flags["run-name"])
folder.mkdir(exist_ok=True)
with (folder / "starts").open("a") as file:
    file.write(json.dumps([flags, os.getpid(), dict(os.environ)]) + "\\n")
rate, metrics = float(flags["learning-rate"]), folder / "metrics.jsonl"
if os.environ.get("FAILS"):
    sys.exit("error: a hook that fails")
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
text = metrics.read_text() if metrics.exists() else ""
metrics.write_text("".join(line for line in text.splitlines(True) if line.endswith("\\n")))
steps = int(os.environ.get("STEPS", 4))
for step in range(len(text.splitlines()) + 1, steps + 1):
    time.sleep(60 if rate > 1 and step > 3 else float(os.environ.get("PACE", 0.02)))
    row = {"step": step, "split": "eval", "loss": rate + 1 / step, "other": None}
    with metrics.open("a") as file:
        file.write(json.dumps(row) + "\\n")
with (folder / "ends").open("a") as file:
    file.write("x")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with sweep.py and the replacement of the engine."""
    shutil.copy(FILE, tmp_path / "sweep.py")
    (tmp_path / "ctl_core").mkdir()
    (tmp_path / "ctl_core" / "__init__.py").touch()
    (tmp_path / "ctl_core" / "__main__.py").write_text(TRAINS)
    return tmp_path


def begin(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Starts the sweep in its own process group."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FAILS")}
    return subprocess.Popen(
        [sys.executable, str(folder / "sweep.py"), *words],
        cwd=folder.parent,
        env={**environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def sweep(folder: Path, *words: str, code: int = 0, **variables: str) -> str:
    """Runs the sweep to its end, and returns its output."""
    process = begin(folder, *words, **variables)
    out = process.communicate(timeout=300)[0]
    assert process.returncode == code, out
    return out


def trials(folder: Path) -> list[Any]:
    """Returns the trials in the journal."""
    storage = JournalStorage(JournalFileBackend(str(folder / "runs" / "sweep.journal")))
    return list(optuna.load_study(study_name="sweep", storage=storage).trials)


def assert_complete(folder: Path, number: int) -> list[Any]:
    """Asserts that the journal has this number of trials, all complete, and returns them."""
    results = trials(folder)
    assert [(trial.number, trial.state.name) for trial in results] == [
        (each, "COMPLETE") for each in range(number)
    ]
    return results


def starts(folder: Path, number: int) -> list[Any]:
    """Returns the flags, the PID and the environment of each process of a trial."""
    file = folder / "runs" / f"sweep-{number:03d}" / "starts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_file_is_short_and_stands_alone() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= 100
    assert "import ctl_core" not in text
    assert "from ctl_core" not in text


def test_trials_are_trained_several_at_a_time(folder: Path) -> None:
    """Each trial runs once with its own values, a GPU and a share of the cores.

    The journal contains its results.
    """
    out = sweep(folder, "--trials", "4", "--parallel", "2", PACE="0.3", CUDA_VISIBLE_DEVICES="5,7")
    results = assert_complete(folder, 4)
    for trial in results:
        ((flags, _, share),) = starts(folder, trial.number)
        assert share["CUDA_VISIBLE_DEVICES"] in ("5", "7")
        assert share["TF_NUM_INTRAOP_THREADS"] == str(-(-(os.cpu_count() or 1) // 2))
        words = [f"--{name}={value}" for name, value in flags.items()]
        # parses the flags as the engine does
        config = parse_command(["train", "--steps=1", *words]).config
        assert config.learning_rate == trial.params["learning_rate"]
        assert config.batch_size == trial.params["batch_size"]
        assert trial.value == pytest.approx(trial.params["learning_rate"] + 1 / 4)
        assert list(trial.intermediate_values) == [1, 2, 3, 4]
    times = [(trial.datetime_start, trial.datetime_complete) for trial in results]
    assert times[1][0] < times[0][1], "two at a time"
    best = min(results, key=lambda trial: trial.value)
    assert out.splitlines()[-1] == f"best: sweep-{best.number:03d}, loss {best.value}"
    sweep(folder, "--trials", "6")
    assert len(trials(folder)) == 6
    assert len(starts(folder, 0)) == 1


def test_a_trial_worse_than_most_is_told_to_end(folder: Path) -> None:
    """A pruned trial counts as one of the requested trials, and has no final value."""
    text = (folder / "sweep.py").read_text()
    drawn = '"learning_rate", 1e-4, 1e-1, log=True'
    assert drawn in text
    text = text.replace(drawn, '"learning_rate", *(2 * [0.1 if trial.number < 5 else 9.0])')
    (folder / "sweep.py").write_text(text)
    sweep(folder, "--trials", "6", STEPS="5")
    *others, worst = trials(folder)
    assert {trial.state.name for trial in others} == {"COMPLETE"}
    assert worst.state.name == "PRUNED"
    assert worst.last_step == 3
    assert not (folder / "runs" / "sweep-005" / "ends").exists()


def test_failures_are_said_with_a_log(folder: Path) -> None:
    """Failed trials do not count, so that the same command trains others after a correction."""
    out = sweep(folder, "--trials", "2", code=1, FAILS="1")
    assert [trial.state.name for trial in trials(folder)] == ["FAIL", "FAIL"]
    assert "sweep-001: fail, loss None" in out
    assert "sweep-*.log say why" in out
    assert (folder / "runs" / "sweep-001.log").read_text() == "error: a hook that fails\n"
    sweep(folder, "--trials", "2")
    assert [trial.state.name for trial in trials(folder)] == 2 * ["FAIL"] + 2 * ["COMPLETE"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_sweep_stops_its_trials_and_resumes(folder: Path, number: int) -> None:
    process = begin(folder, "--trials", "3", "--parallel", "2", STEPS="60", PACE="0.1")
    wait_until(lambda: len(steps(folder)) >= 5, seconds=120)
    process.send_signal(number)
    process.wait(60)
    assert process.returncode == 128 + number
    before = steps(folder)
    assert [trial.state.name for trial in trials(folder)] == 2 * ["RUNNING"]
    time.sleep(0.3)
    assert steps(folder) == before, "none trains on"
    sweep(folder, "--trials", "3", "--parallel", "2", STEPS="60", PACE="0")
    assert_whole(folder, 3)


def assert_whole(folder: Path, number: int) -> None:
    """Asserts that each trial has trained each step once, and has kept its values."""
    results = assert_complete(folder, number)
    names = [f"sweep-{trial.number:03d}" for trial in results]
    assert sorted(path.name for path in (folder / "runs").iterdir() if path.is_dir()) == names
    for trial, name in zip(results, names, strict=True):
        assert [step for run, step in steps(folder) if run == name] == [*range(1, 61)]
        assert list(trial.intermediate_values) == [*range(1, 61)]
        for flags, *_ in starts(folder, trial.number):
            assert float(flags["learning-rate"]) == trial.params["learning_rate"]
            assert int(flags["batch-size"]) == trial.params["batch_size"]


def steps(folder: Path) -> list[tuple[str, int]]:
    """Returns the run and the step of each complete line of metrics."""
    files = sorted((folder / "runs").glob("*/metrics.jsonl"))
    lines = [
        (file.parent.name, line) for file in files for line in file.read_text().splitlines(True)
    ]
    return [(name, json.loads(line)["step"]) for name, line in lines if line.endswith("\n")]


def kill(process: subprocess.Popen[str], what: str) -> None:
    """Sends SIGKILL to the sweep, to its trials, or to all of them."""
    listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    trials = [int(word) for word in listed.stdout.split()]
    victims = {"sweep": [process.pid], "trials": trials, "all": [process.pid, *trials]}
    for victim in victims[what]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


@pytest.mark.slow
def test_sweep_survives_ten_kills(folder: Path) -> None:
    """Each step is trained and reported once, whichever processes are killed."""

    def begun() -> subprocess.Popen[str]:
        return begin(folder, "--trials", "5", "--parallel", "2", STEPS="60", PACE="0.1")

    chance, process = random.Random(2), begun()
    for kind in ["all", "trials", "sweep", "all", "trials"] * 2:
        time.sleep(chance.uniform(0.1, 2.0))
        assert process.poll() is None, "ended before it was killed ten times"
        kill(process, kind)
        if kind != "trials":
            process.wait()
            process = begun()
    out = process.communicate(timeout=500)[0]
    assert process.returncode == 0, out
    assert_whole(folder, 5)
