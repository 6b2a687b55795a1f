"""Runs in the background, the commands about runs, and training_log.md."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ctl_core import run_process, training_log
from ctl_core.__main__ import main
from ctl_core.settings import Config
from tests.helpers.project import source_of

SLOW = "import time\n\n\ndef slow(step):\n    time.sleep(0.05)\n\n\nevery_steps = {1: slow}\n"


def _state(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["runs", "--json", "--runs-dir", str(folder.parent)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (state,) = (run["state"] for run in found if run["name"] == folder.name)
    return str(state)


@pytest.mark.slow
def test_a_run_in_the_background_is_killed_resumed_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").write_text(source_of(every_steps=SLOW))
    root = str(Path(run_process.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", root)
    train = [sys.executable, "-m", "ctl_core", "train", "--background", "--run-name", "a"]
    noted = ["--note", "x", "--batch-size", "8", "--steps", "5000", "--ckpt-every", "10"]
    folder = tmp_path / "runs" / "a"
    for again in (False, True):
        subprocess.run([*train, *noted], check=True)
        deadline = time.monotonic() + 120
        while not (folder / "config.yaml").is_file() or _state(folder, capsys) != "running":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert main(["train", "--background", "--run-name", "a"]) == 2
        process = run_process.read_process(folder)
        assert process is not None and process.background
        if not again:
            os.kill(process.pid, signal.SIGKILL)
            while process.alive() or run_process.held(folder):
                time.sleep(0.1)
            assert _state(folder, capsys) == "killed"
    assert main(["stop", "a"]) == 0
    assert _state(folder, capsys) == "stopped"
    assert main(["stop", "a"]) == 2
    log = Path("training_log.md").read_text()
    assert log.count("## runs/a") == 1 and "- Result: stopped by SIGTERM" in log
    assert main(["logs", "a"]) == 0
    assert "stopped by SIGTERM, saved" in capsys.readouterr().out


def test_the_entry_of_a_run_leaves_what_the_user_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "a-2"):
        folder = Path("runs", name).absolute()
        folder.mkdir(parents=True)
        run_process.begin(folder, os.getpid())
        training_log.begin(folder, f"note of {name}", Config(steps=3))
    log = Path("training_log.md")
    log.write_text(log.read_text().replace("\n## runs/a-2", "\nMy own words.\n\n## runs/a-2"))
    before = log.read_text()
    process = run_process.end(Path("runs/a").absolute(), "done", "", 3, {"loss": 0.5})
    assert process is not None
    training_log.complete(Path("runs/a").absolute(), process)
    changed = [
        (old, new)
        for old, new in zip(before.splitlines(), log.read_text().splitlines(), strict=True)
        if old != new
    ]
    ((old, new),) = changed
    assert old == "- Result: none yet"
    assert new.startswith("- Result: done, at step 3; evaluation: loss 0.5; ")
    assert before.index("My own words") > before.index(old)


def test_another_machines_process_and_a_reused_number_are_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    process = run_process.begin(folder, os.getpid())
    assert _state(folder, capsys) == "starting"
    process.born = 1
    run_process.write(folder, process)
    assert _state(folder, capsys) == "killed"
    assert main(["stop", "a"]) == 2
    process.host = f"not-{platform.node()}"
    run_process.write(folder, process)
    assert main(["stop", "a"]) == 2
    assert f"runs on not-{platform.node()}" in capsys.readouterr().err


def test_a_run_that_is_stopped_before_its_first_step_was_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as starting:
        run_process.begin(folder, starting.pid)
        threading.Thread(target=starting.wait, daemon=True).start()
        assert main(["stop", "a"]) == 0
    assert capsys.readouterr().out == "runs/a: stopped before its first step.\n"
    assert _state(folder, capsys) == "stopped"


def test_workers_that_cannot_be_are_refused_before_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").write_text(source_of())
    words = ("--background", "--workers", "3", "--batch-size", "32", "--steps", "3")
    assert main(["train", *words]) == 2
    assert "batch_size: 32 cannot be shared out evenly over 3" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_list_of_runs_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line a run, without blanks behind it, however long the error; typos get the nearest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, line in (("a", "x" * 300), ("longer", "")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        run_process.begin(folder, os.getpid())
        run_process.end(folder, "failed", line, 3, {"loss": 0.5})
    assert main(["runs", "--sort", "name"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line == line.rstrip() for line in lines)
    assert "xxx" in lines[1] and len(lines[1]) < 170 and lines[1].endswith("loss 0.5")
    assert main(["runs", "--sort", "stpe"]) == 2
    assert "did you mean 'step'? (there: age, name, step, state, loss)" in capsys.readouterr().err
    assert main(["runs", "--stat", "done"]) == 2
    assert "runs: unknown flag --stat; did you mean '--state'?" in capsys.readouterr().err
