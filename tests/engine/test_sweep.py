"""``sweep``: trials that are runs, killed and gone on with; its file checked before any starts.

A stand-in trains: a package ``ctl_core`` in the working folder, which each trial starts as its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from ctl_core import run_process
from ctl_core.__main__ import main
from ctl_core.settings import Config
from ctl_core.sweep.jobs import Job
from ctl_core.sweep.plan import read_plan
from ctl_core.sweep.rounding import rounded
from ctl_core.sweep.study import Sweep

ROOT = Path(__file__).resolve().parents[2]
TRAINS = """
import argparse, fcntl, json, os, pathlib, signal, sys, time
import yaml

parser = argparse.ArgumentParser()
parser.add_argument("command")
parser.add_argument("--config", action="append")
for name in ("--run-name", "--runs-dir"):
    parser.add_argument(name)
options = parser.parse_args()
settings = {}
for file in options.config:
    settings |= yaml.safe_load(open(file))
folder = pathlib.Path(options.runs_dir, options.run_name)
lock = (folder / "train.log").open("a")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
lock.write(json.dumps(settings) + "\\n")
lock.flush()
rate = settings["learning_rate"]
if rate == 0.5:
    sys.exit("error: a hook that fails")
metrics = folder / "metrics.jsonl"
begun = len(metrics.read_text().splitlines()) if metrics.exists() else 0


def end(how):
    process = json.loads((folder / "process.json").read_text())
    (folder / "process.json").write_text(json.dumps(process | {"ended": time.time(), "how": how}))


def stopped(*_):
    end("stopped")
    os._exit(143)


signal.signal(signal.SIGTERM, stopped)
for step in range(begun + 1, settings["steps"] + 1):
    time.sleep(0.05)
    values = {"loss": rate * 10 / step, "val/accuracy": 1 - abs(rate - 0.03) - 1 / (step + 9)}
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step, "split": "eval"} | values) + "\\n")
end("done")
"""
SWEEP: dict[str, Any] = {
    "metric": "val/accuracy",
    "space": {
        "learning_rate": {"min": 0.001, "max": 0.1, "log": True},
        "hparams.width": {"min": 8, "max": 64, "step": 8},
        "batch_size": [32, 64],
    },
    "settings": {"steps": 10},
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose trials take a second, with a sweep.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    Path("ctl_core").mkdir()
    Path("ctl_core/__init__.py").touch()
    Path("ctl_core/__main__.py").write_text(TRAINS)
    Path("config.yaml").write_text("steps: 99\nhparams:\n  width: 16\n")
    write(SWEEP)
    return tmp_path


def write(content: dict[str, Any], name: str = "s.yaml") -> None:
    Path(name).write_text(yaml.safe_dump(content))


def trials(name: str = "s") -> list[Any]:
    storage = JournalStorage(JournalFileBackend(f"sweeps/{name}/journal.log"))
    return list(optuna.load_study(study_name=name, storage=storage).trials)


def settings_of(run: str) -> list[dict[str, Any]]:
    """What each start of a run was told."""
    return [json.loads(line) for line in Path("runs", run, "train.log").read_text().splitlines()]


def test_the_best_of_some_trials(capsys: pytest.CaptureFixture[str]) -> None:
    """A process each, with its settings; the best as a file for --config; pictures and a table."""
    assert main(["sweep", "s.yaml", "--trials", "6", "--jobs", "3", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    found = trials()
    assert [trial.state.name for trial in found] == 6 * ["COMPLETE"]
    rates = [trial.params["learning_rate"] for trial in found]
    assert [float(f"{rate:.4g}") for rate in rates] == rates and len({*rates}) == 6
    best = max(found, key=lambda trial: trial.value)
    assert f"best: {best.user_attrs['run']}" in out
    for trial in found:
        (told,) = settings_of(trial.user_attrs["run"])
        assert told["steps"] == 10 and told["learning_rate"] == trial.params["learning_rate"]
        assert told["hparams"] == {"width": trial.params["hparams.width"]}
        assert trial.value == pytest.approx(1 - abs(told["learning_rate"] - 0.03) - 1 / 19)
    content = yaml.safe_load(Path("sweeps/s/best.yaml").read_text())
    assert content == settings_of(best.user_attrs["run"])[0] | {}
    assert main(["sweep", "s.yaml", "--trials", "6"]) == 0  # there are enough
    assert len(trials()) == 6
    for name in ("history", "importance"):
        assert Path(f"sweeps/s/{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on(project: Path) -> None:
    """No trial is lost or had twice: after SIGKILL of the sweep alone, of all; Ctrl-C; SIGTERM."""
    write(SWEEP | {"settings": {"steps": 30}})
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from ctl_core.__main__ import main"
    words = ["sweep", "s.yaml", "--trials", "12", "--jobs", "2", "--no-prune"]
    command = [sys.executable, "-c", f"{program}; sys.exit(main({words}))"]

    def begin(lines: int) -> subprocess.Popen[bytes]:
        """Starts it, and waits until its runs have measured so often."""
        process = subprocess.Popen(command, start_new_session=True)
        deadline = time.monotonic() + 600  # a killed one has left a lock, which the next waits for
        while measured() < lines:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        return process

    def measured() -> int:
        return sum(len(p.read_text().splitlines()) for p in Path("runs").glob("*/metrics.jsonl"))

    one = begin(40)
    one.kill()  # its runs go on, and are watched by the next
    one.wait()
    other = begin(110)
    other.kill()
    other.wait()
    for folder in Path("runs").iterdir():
        process = json.loads((folder / "process.json").read_text())
        if process["how"] is None:
            os.kill(process["pid"], signal.SIGKILL)
    third = begin(140)
    third.send_signal(signal.SIGINT)
    assert third.wait(600) == 130
    fourth = begin(210)
    fourth.send_signal(signal.SIGTERM)
    assert fourth.wait(600) == 143
    assert subprocess.run(command).returncode == 0
    found = trials()
    complete = [trial for trial in found if trial.state.name == "COMPLETE"]
    runs = Counter(trial.user_attrs["run"] for trial in complete)
    assert sorted(runs) == [f"s-{number:04d}" for number in range(12)] == sorted(os.listdir("runs"))
    assert {*runs.values()} == {1} and len(found) > 12
    assert not list(Path("sweeps/s").glob(".*-*"))
    for name in runs:
        lines = Path("runs", name, "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [*range(1, 31)]
        told = settings_of(name)
        assert all(each == told[0] for each in told)


def test_a_lock_that_a_killed_sweep_has_left_is_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ctl_core.sweep.study.LEFT", 3)
    locks: list[Any] = []

    class Backend(JournalFileBackend):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            locks.append(self._lock)

    monkeypatch.setattr("optuna.storages.journal.JournalFileBackend", Backend)
    write(SWEEP | {"settings": {"steps": 2}})
    assert main(["sweep", "s.yaml", "--trials", "1"]) == 0
    locks[0].acquire()  # and is killed
    another = threading.Thread(target=locks[0].acquire, daemon=True)
    another.start()
    another.join(600)
    assert not another.is_alive()
    locks[0].release()
    assert main(["sweep", "s.yaml", "--trials", "2"]) == 0


def test_a_grid_is_gone_through_once() -> None:
    space = {"learning_rate": [0.01, 0.02], "hparams.width": {"min": 8, "max": 16, "step": 4}}
    write(SWEEP | {"space": space, "settings": {"steps": 2}})
    for count in ("4", "99"):
        words = ["--sampler", "grid", "--trials", count, "--jobs", "3"]
        assert main(["sweep", "s.yaml", *words]) == 0
    found = [(t.params["learning_rate"], t.params["hparams.width"]) for t in trials()]
    assert sorted(found) == [(rate, width) for rate in (0.01, 0.02) for width in (8, 12, 16)]


def test_what_is_worse_than_most_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """By SIGTERM, which saves it; the value of a run is its best one."""
    space = {"learning_rate": [0.03, 0.031, 0.032, 0.033, 0.034, 0.1]}
    write(SWEEP | {"space": space, "settings": {"steps": 40}})
    assert main(["sweep", "s.yaml", "--sampler", "grid", "--jobs", "1"]) == 0
    *others, worst = trials()
    assert {trial.state.name for trial in others} <= {"COMPLETE", "PRUNED"}
    assert worst.state.name == "PRUNED" and "s-0005: pruned at step" in capsys.readouterr().out
    assert len(Path("runs/s-0005/metrics.jsonl").read_text().splitlines()) < 40
    assert main(["runs"]) == 0
    assert "pruned: others were better" in capsys.readouterr().out


def test_a_run_that_had_come_to_its_end_when_it_was_told_to_is_complete(tmp_path: Path) -> None:
    """Others were better at its last step, say, and the process had not ended yet."""
    job = Job(None, tmp_path / "runs" / "s-0000", {}, 0, read_plan(Path("s.yaml")))
    Path("ctl_core/__main__.py").write_text("import time\n\ntime.sleep(60)\n")
    for how, state in ((None, "stopped"), ("stopped", "stopped"), ("done", "complete")):
        job.start(tmp_path, {})
        if how is not None:
            run_process.end(job.folder, how)
        job.best = 0.5
        job.stop()
        while job.runs():
            time.sleep(0.01)
        assert job.ended()[0] == state
    job.start(tmp_path, {})
    process = run_process.read_process(job.folder)
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    while job.runs():
        time.sleep(0.01)
    assert job.ended() == ("fail", "ended by signal 9 (Killed)")


def test_conditions_are_a_hook(capsys: pytest.CaptureFixture[str]) -> None:
    Path("space.py").write_text(
        "def sweep_space(trial):\n"
        "    kind = trial.suggest_categorical('kind', ['a', 'b'])\n"
        "    width = trial.suggest_int('width', 8, 9) if kind == 'a' else 64\n"
        "    return {'hparams.width': width, 'learning_rate': 0.01}\n"
    )
    write({"metric": "loss", "hook": "space.py", "settings": {"steps": 2}})
    assert main(["sweep", "s.yaml", "--trials", "4", "--jobs", "4", "--seed", "0"]) == 0
    for trial in trials():
        (told,) = settings_of(trial.user_attrs["run"])
        assert told["learning_rate"] == 0.01
        assert told["hparams"]["width"] == trial.params.get("width", 64)
    text = Path("space.py").read_text().replace("hparams.width", "hparams.widht")
    Path("space.py").write_text(text)
    assert main(["sweep", "s.yaml", "--name", "t", "--trials", "1"]) == 2
    assert "did you mean 'hparams.width'?" in capsys.readouterr().err


def test_a_run_that_fails_ends_no_sweep_but_three_do(capsys: pytest.CaptureFixture[str]) -> None:
    write(SWEEP | {"space": {"learning_rate": [0.5, 0.01, 0.02]}, "settings": {"steps": 2}})
    assert main(["sweep", "s.yaml", "--sampler", "grid"]) == 0
    assert "s-0000: fail  a hook that fails" in capsys.readouterr().out
    assert [trial.state.name for trial in trials()] == ["FAIL", "COMPLETE", "COMPLETE"]
    write(SWEEP | {"space": {"learning_rate": [0.5], "seed": [1, 2, 3, 4, 5]}})
    assert main(["sweep", "s.yaml", "--sampler", "grid", "--name", "t"]) == 1
    assert "sweep: 3 runs failed, and none came through" in capsys.readouterr().err
    assert len(list(Path("runs").glob("t-*"))) == 3


def test_a_metric_that_no_run_has(capsys: pytest.CaptureFixture[str]) -> None:
    write(SWEEP | {"metric": "val/acuracy:max"})
    assert main(["sweep", "s.yaml"]) == 2
    err = capsys.readouterr().err
    assert "metric: no evaluation of s-0000 has 'val/acuracy'; did you mean 'val/accuracy'?" in err
    assert err.endswith("(there: loss, val/accuracy)\n") and err.count("\n") == 1


def test_a_sweep_that_found_nothing_begins_anew_when_its_file_is_corrected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Beside its runs, not in them; one that has found something does not."""
    write(SWEEP | {"metric": "val/acuracy:max", "settings": {"steps": 3}})
    assert main(["sweep", "s.yaml", "--trials", "2"]) == 2
    before = Path("runs/s-0000/metrics.jsonl").read_text()
    write(SWEEP | {"metric": "loss", "settings": {"steps": 2}})
    capsys.readouterr()
    for _ in range(2):
        assert main(["sweep", "s.yaml", "--trials", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("sweeps/s: begins anew") == 1 and "begin with s-0001; those before stay" in out
    assert sorted(os.listdir("runs")) == ["s-0000", "s-0001", "s-0002"]
    assert Path("runs/s-0000/metrics.jsonl").read_text() == before
    found = trials()
    assert [trial.user_attrs["run"] for trial in found] == ["s-0001", "s-0002"]
    best = min(found, key=lambda trial: trial.value)
    assert yaml.safe_load(Path("sweeps/s/best.yaml").read_text())["steps"] == 2
    assert best.user_attrs["run"] in Path("sweeps/s/best.yaml").read_text()


def test_table_and_pictures_call_runs_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed sweep's runs are trials of later numbers when it goes on."""
    write(SWEEP | {"settings": {"steps": 2}})
    plan = read_plan(Path("s.yaml"))
    first = Sweep(Path("sweeps/s"), plan, 3, "tpe", 0)
    monkeypatch.setattr(first, "_owner", Path("sweeps/s/another"))  # a process that was killed
    asked = [first.ask() for _ in range(2)]
    first._held.close()
    assert [run for _, run, _ in filter(None, asked)] == ["s-0000", "s-0001"]
    drawn: list[Any] = []

    def draw(figure: Any, path: Path) -> None:
        drawn.append(figure)

    monkeypatch.setattr("ctl_core.sweep.report._write", draw)
    assert main(["sweep", "s.yaml", "--trials", "3"]) == 0
    assert [trial.number for trial in trials() if trial.state.name == "COMPLETE"] == [2, 3, 4]
    panel = drawn[0].axes[0]
    assert list(panel.lines[0].get_xdata()) == [0, 1, 2]
    out = capsys.readouterr().out
    best = out.split("best: ")[1].split(".")[0]
    assert list(panel.lines[1].get_xdata()) == [int(best[-4:])]
    assert best in [text.get_text() for text in panel.get_legend().get_texts()]
    drawn[0].canvas.draw()
    ticks = [tick.get_text() for tick in panel.get_xticklabels()]
    assert {"0000", "0001", "0002"} <= {*ticks}


def test_values_are_rounded_within_their_range_to_what_tells_them_apart() -> None:
    def real(low: float, high: float, **how: Any) -> Any:
        return optuna.distributions.FloatDistribution(low, high, **how)

    assert rounded(0.040978511641450006, real(1e-4, 0.1, log=True)) == 0.04098
    assert rounded(0.98765432, real(0.9, 0.999)) == 0.98765
    assert rounded(0.123411111, real(0.12341, 0.12342)) == 0.12341111
    assert rounded(0.33333333, real(0.33333, 3.0)) == 0.33333
    assert rounded(0.123456, real(0.0, 1.0, step=0.125)) == 0.123456
    assert rounded(7, optuna.distributions.IntDistribution(1, 9)) == 7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"space": {"lerning_rate": [1]}}, "lerning_rate: is no setting; did you mean 'learning_"),
        ({"space": {"hparams.widht": [1]}}, "not among the hparams of config.yaml; did you mean"),
        ({"space": {"batch_size": []}}, "space: batch_size: is empty"),
        ({"space": {}}, "space: is empty; name a setting"),
        ({"space": {"seed": {"min": 3, "max": 3}}}, "seed: is empty: min 3 is not below max 3."),
        (
            {"space": {"seed": {"min": 0, "max": 3, "step": 0}}},
            "seed: step: expected a number above 0",
        ),
        ({"space": {"seed": {"min": 0, "max": 3, "log": True}}}, "log needs a min above 0"),
        ({"space": {"seed": {"min": 0, "mux": 3}}}, "expected a list of values, or min and max"),
        ({"space": {"batch_size": {"min": -1, "max": 3}}}, "space: batch_size: expected"),
        ({"space": {"run_name": ["a"]}}, "run_name: each trial has its own"),
        ({"settings": {"stesp": 3}}, "settings: stesp: is no setting; did you mean 'steps'?"),
        ({"metirc": "loss"}, "unknown name 'metirc'; did you mean 'metric'?"),
        ({"metrics": "loss", "metric": None}, "unknown name 'metrics'; did you mean 'metric'?"),
        ({"metric": None}, "s.yaml: metric: expected a name such as accuracy, got None"),
        ({"metric": "elbo"}, "say whether elbo is better when it is higher or lower: elbo:max"),
        (
            {"space": {"seed": {"min": 1, "max": 3, "log": "yess"}}},
            "seed: log: expected true or false, got 'yess'.",
        ),
        ({"hook": "none.py"}, "hook: there is no file none.py."),
    ],
)
def test_a_wrong_file_is_one_line(
    change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any run starts."""
    write(SWEEP | change)
    assert main(["sweep", "s.yaml"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err
    assert not Path("runs").exists() and not Path("sweeps").exists()


def test_the_file_in_the_documentation_is_one() -> None:
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    Path("d.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    plan = read_plan(Path("d.yaml"))
    assert plan.metric == "accuracy" and plan.highest and plan.settings["steps"] == 300
    assert plan.space["learning_rate"].log and plan.space["hparams.width"].whole
    function: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], function)
    found = function["sweep_space"](optuna.trial.FixedTrial({"lr_schedule": "cosine", "warmup": 9}))
    assert Config(**found).warmup == 9


def test_a_sweep_that_is_another_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write(SWEEP | {"settings": {"steps": 1}})
    assert main(["sweep", "s.yaml", "--trials", "1"]) == 0
    write(SWEEP | {"settings": {"steps": 2}})
    for words, line in (
        (["s.yaml"], "sweeps/s: is a sweep of another metric, space or settings"),
        (["s.yaml", "--sampler", "grid"], "sampler: grid needs values to go through"),
        (["s.yaml", "--jobs", "0"], "jobs: expected at least 1"),
        (["t.yaml"], "t.yaml: cannot be read: No such file"),
        (["s.yaml", "--trails", "3"], "unknown flag --trails; did you mean '--trials'?"),
    ):
        capsys.readouterr()
        assert main(["sweep", *words]) == 2
        assert line in capsys.readouterr().err
