"""Runs in the background, the commands about runs, and training_log.md."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ctl_core import run_process, training_log
from ctl_core.__main__ import main
from ctl_core.layers import write_config
from ctl_core.run_folder import Run
from ctl_core.settings import Config
from ctl_core.tools.runs import look_at
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import source_of

SLOW = "import time\n\n\ndef slow(step):\n    time.sleep(0.05)\n\n\nevery_steps = {1: slow}\n"


HELD = """
from pathlib import Path


def end():
    Path("hold").touch()


at_end = end


def create_eval_dataset(per_replica_batch_size):
    while Path("hold").exists():
        time.sleep(0.05)
    return data.batch(per_replica_batch_size)
"""


def _run(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["runs", "--json", "--runs-dir", str(folder.parent)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (run,) = (run for run in found if run["name"] == folder.name)
    return dict(run)


def _state(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return str(_run(folder, capsys)["state"])


@pytest.mark.slow
def test_a_run_in_the_background_is_killed_resumed_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").write_text(source_of(every_steps=SLOW))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    train = [sys.executable, "-m", "ctl_core", "train", "--background", "--run-name", "a"]
    noted = ["--note", "x", "--batch-size", "8", "--steps", "5000", "--ckpt-every", "10"]
    folder = tmp_path / "runs" / "a"
    for again in (False, True):
        subprocess.run([*train, *noted], check=True)
        deadline = time.monotonic() + 600
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


@pytest.mark.slow
def test_what_follows_a_training_is_part_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``runs``, ``logs -f``, ``stop`` and the note take a run with --then as one to its end."""
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").write_text(source_of(every_steps="import time\n" + HELD))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    train = [sys.executable, "-m", "ctl_core", "train", "--background", "--run-name", "a"]
    folder = tmp_path / "runs" / "a"
    for step, stopped in ((3, True), (6, False)):
        words = ["--note", "x", "--batch-size", "8", "--then", "evaluate,export"]
        words += ["--steps", str(step)]
        subprocess.run([*train, *words], check=True)
        logs = subprocess.Popen(
            [sys.executable, "-m", "ctl_core", "logs", "a", "-f"], stdout=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 600
        while (found := _run(folder, capsys))["said"] != "done; evaluate follows":
            assert time.monotonic() < deadline and logs.poll() is None, found
            time.sleep(0.1)
        assert found["state"] == "running" and found["step"] == step
        assert main([*train[3:], *words]) == 2
        assert "goes on with evaluate of this run; stop it" in capsys.readouterr().err
        if stopped:
            assert main(["stop", "a"]) == 0
            said = "runs/a: done at step 3; evaluate, which followed, was stopped.\n"
            assert capsys.readouterr().out == said
            result = "- Result: stopped by SIGTERM in evaluate, at step 3; evaluation: loss"
        Path("hold").unlink()
        printed = logs.communicate(timeout=600)[0]
        if not stopped:
            assert "wrote a SavedModel to runs/a/export/1" in printed
            result = "- Result: done, at step 6; evaluation: loss"
        assert _state(folder, capsys) == ("stopped" if stopped else "done")
        assert result in Path("training_log.md").read_text()


def test_what_follows_a_training_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").write_text(source_of())
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("callbacks", None)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "export").write_text("no folder")
    words = ["--steps", "2", "--batch-size", "8", "--then", "export", "--note", "x"]
    assert main(["train", "--run-name", "a", *words]) == 2
    found = _run(folder, capsys)
    assert found["state"] == "failed" and found["said"].startswith("export: output: runs/a/export")
    log = Path("training_log.md").read_text()
    assert "- Result: failed, at step 2; export: output: runs/a/export" in log


def test_a_killed_process_that_had_trained_says_in_what(tmp_path: Path) -> None:
    run_process.begin(tmp_path, os.getpid())
    process = run_process.end(tmp_path, "done", "", 3, {})
    assert process is not None
    process.then, process.born = ["export"], 1
    run_process.write(tmp_path, process)
    found = look_at(tmp_path)
    assert (found.state, found.said) == ("killed", "in export, after the training")


PROGRAM = """
import sys, threading

import ctl_core

sys.path.insert(0, ".")
import callbacks

state = ctl_core.train(callbacks, ctl_core.Config(steps=100_000, batch_size=8, run_name="a"))
print("went on", state.stopped_by, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_of_a_notebook_is_stopped_and_the_notebook_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").write_text(source_of(every_steps=SLOW))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes) as program:
        deadline = time.monotonic() + 600
        while not Path("runs/a/config.yaml").is_file():
            assert time.monotonic() < deadline and program.poll() is None
            time.sleep(0.1)
        assert main(["stop", "a", "--timeout", "60"]) == 0
        out = capsys.readouterr().out
        assert "saved; goes on with --run-name a" in out
        assert f"or notebook, goes on (process {program.pid})" in out
        assert program.poll() is None
        assert main(["stop", "a"]) == 2
        assert "is not running, but stopped" in capsys.readouterr().err
        said = program.communicate(timeout=600)[0]
    assert "went on 2\n" in said and program.returncode == 0


def test_a_damaged_process_json_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is in it, ``runs`` lists the run, and ``stop`` signals nobody."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    whole = dataclasses.asdict(run_process.begin(folder, os.getpid()))
    text = json.dumps(whole)
    damaged = ["", text[:40], "[]", "7", "null", "\x00" * 30, "[" * 100_000, '{"pid": 1}']
    wrong: dict[str, list[Any]] = {
        "pid": ["1", 0, -1, True, 1 << 40],
        "born": ["x"],
        "host": [None, 3],
        "started": ["x", float("nan"), float("inf"), -1, 10**400],
        "ended": ["x", 1e300],
        "how": [3, ["done"]],
        "line": [None],
        "step": ["3", 2.5],
        "metrics": [None, [1], {"loss": "x"}, {"loss": [1]}],
        "training_log": [3],
        "then": ["export", [3], None],
        "program": [None],
        "flags": ["--steps", [3], None],
        "changed": [["steps"], {"steps": 3}],
        "evaluated": ["3", 2.5],
        "seconds": ["3", -1],
    }
    damaged += [
        json.dumps({**whole, name: value}) for name, values in wrong.items() for value in values
    ]
    file = folder / run_process.FILE
    for content in damaged:
        file.write_text(content)
        assert run_process.read_process(folder) is None, content[:100]
        found = _run(folder, capsys)
        assert (found["state"], found["said"]) == ("unknown", "its process.json is damaged")
        assert main(["runs"]) == 0
        assert main(["stop", "a"]) == 2
        assert "runs/a: is not running; there is nothing to stop." in capsys.readouterr().err
    file.write_bytes(b"\xff\xfe")
    assert run_process.read_process(folder) is None
    file.write_text(json.dumps({**whole, "of a newer engine": [1]}))
    assert _state(folder, capsys) == "starting"
    file.write_text("{")
    with (folder / "train.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert main(["stop", "a"]) == 2
    assert "(its process.json is damaged)" in capsys.readouterr().err


def test_a_run_goes_on_with_a_damaged_process_json_or_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("callbacks.py").write_text(source_of())
    sys.modules.pop("callbacks", None)
    train = ["train", "--run-name", "a", "--batch-size", "8", "--steps"]
    assert main([*train, "2", "--note", "x"]) == 0
    folder, log = tmp_path / "runs" / "a", Path("training_log.md")
    (folder / run_process.FILE).write_text('{"pid": ')
    environment = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(
        json.dumps({**environment, "started": "2020-02-02T0:0:0+0000"})
    )
    found = _run(folder, capsys)
    assert (found["state"], found["step"], found["started"]) == ("done", 2, 1580601600.0)
    own = (folder / "config.yaml").read_text()
    for damaged in ("", "--- {}", "steps"):
        (folder / "config.yaml").write_text(damaged)
        for words in ([*train, "4"], ["compare", "a"], ["evaluate", "--run-name", "a"]):
            (folder / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1.0}\n')
            assert main(words) == 2
            said = "error: runs/a/config.yaml: is damaged, so that the settings of this run are not"
            assert capsys.readouterr().err.startswith(said)
        assert main(["runs"]) == 0
    (folder / "config.yaml").write_text(own)
    assert main([*train, "4", "--note", "x"]) == 0
    assert _state(folder, capsys) == "done"
    assert "- Result: done, at step 4; " in log.read_text()
    log.write_bytes(b"\xff" + log.read_bytes())  # in another encoding: a warning at the end
    assert main([*train, "6"]) == 0
    assert "how it ended cannot be written: " in (folder / "train.log").read_text()


def test_forks_and_runs_that_are_watched_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "b"
    folder.mkdir(parents=True)
    write_config(Config(steps=3, fork="a@10"), folder / "config.yaml")
    run_process.begin(folder, os.getpid())
    run_process.end(folder, "diverged", "", 3, {"loss": float("nan")})
    with (folder / run_process.WATCHED).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = _run(folder, capsys)
        assert (found["fork"], found["watched"]) == ("a@10", True)
        assert main(["runs", "--state", "diverged"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split() == [
        "b",
        "diverged",
        "3",
        "0",
        "s",
        *["fork", "of", "a@10", "watched", "loss", "NaN"],
    ]
    assert not _run(folder, capsys)["watched"]


def test_without_locks_a_living_process_still_keeps_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a file system that refuses them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("callbacks.py").write_text(source_of())
    sys.modules.pop("callbacks", None)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (folder / "train.log").touch()
    train = ["train", "--run-name", "a", "--steps", "2", "--batch-size", "8"]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        run_process.begin(folder, other.pid)
        assert _state(folder, capsys) == "running"
        assert main(train) == 2
        assert "another process is training this run" in capsys.readouterr().err
        other.communicate(b"\n")
    assert _state(folder, capsys) == "killed"
    assert main(train) == 0
    assert "cannot be locked" in (folder / "train.log").read_text()
    assert _state(folder, capsys) == "done"


def test_a_second_interrupt_after_the_run_is_saved_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends the drawing of curves, say; the last word is that the run is saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    kill = "import signal\n\nevery_steps = {2: lambda step: signal.raise_signal(signal.SIGINT)}\n"
    Path("callbacks.py").write_text(source_of(every_steps=kill))
    sys.modules.pop("callbacks", None)
    close = Run.close

    def interrupted(run: Run) -> None:
        close(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "close", interrupted)
    train = ["train", "--run-name", "a", "--batch-size", "8", "--steps"]
    assert main([*train, "9"]) == 130
    out, err = capsys.readouterr()
    assert "stopped by SIGINT, saved" in out.splitlines()[-1] and err == ""
    assert _run(tmp_path / "runs" / "a", capsys)["said"] == "SIGINT"
    monkeypatch.setattr(signal, "raise_signal", lambda _: None)
    assert main([*train, "9"]) == 130, "done, and something else was not"
    assert capsys.readouterr().err == "error: interrupted\n"


def test_the_result_is_that_of_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its time, the settings at its end, and the step of an evaluation before that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    hooks = """
import signal

every_steps = {6: lambda step: signal.raise_signal(signal.SIGINT)}


def create_eval_dataset(per_replica_batch_size):
    return data.batch(per_replica_batch_size)
"""
    Path("callbacks.py").write_text(source_of(every_steps=hooks))
    sys.modules.pop("callbacks", None)
    log, progress = Path("training_log.md"), Path("runs", "a", "progress.jsonl")
    train = ["train", "--run-name", "a", "--batch-size", "8", "--eval-every", "4", "--steps"]
    assert main([*train, "9", "--note", "x"]) == 130
    assert "; evaluation of step 4: loss " in capsys.readouterr().out.splitlines()[-1]
    assert "\n- Result: stopped by SIGINT, at step 6; evaluation of step 4: loss" in log.read_text()
    assert "at the end with" not in log.read_text()
    lines = [json.loads(line) for line in progress.open()]
    lines[0]["seconds"] += 5000
    progress.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([*train, "8", "--seed", "0", "--hparams.w", "2"]) == 0
    text = log.read_text()
    assert "\n- Settings: steps 9, batch_size 8, eval_every 4\n" in text
    (result,) = (line for line in text.splitlines() if line.startswith("- Result: "))
    assert result.startswith("- Result: done, at step 8; evaluation: loss ")
    assert result.endswith(" s; at the end with steps 8, hparams.w 2")
    assert "; 500" in result
    assert main(["compare", "a"]) == 0
    assert "1 h 23 min" in capsys.readouterr().out


def test_what_is_refused_is_refused_before_a_word_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").write_text(source_of())
    Path("config.yaml").write_text("steps: 600\n")
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    write_config(Config(steps=3000, run_name="a"), folder / "config.yaml")
    run_process.begin(folder, os.getpid())
    training_log.begin(folder, "wider helps", Config(steps=3000))
    with (folder / "train.log").open("w") as log:
        for more in ([], ["--background"], ["--workers", "2"], ["--note", "deeper helps"]):
            if more[:1] != ["--note"]:
                fcntl.flock(log, fcntl.LOCK_EX)
            assert main(["train", "--run-name", "a", *more]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            if more[:1] == ["--note"]:
                assert err.startswith("error: note: runs/a has an entry in training_log.md already")
            else:
                assert err == (
                    "error: runs/a: another process is training this run; stop it (python -m "
                    "ctl_core stop a), or choose another run_name.\n"
                )
            fcntl.flock(log, fcntl.LOCK_UN)


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
    (folder / "train.log").touch()  # whose lock is free, as far as locks reach
    assert _run(folder, capsys)["said"] == f"on not-{platform.node()}"
    assert main(["stop", "a"]) == 2
    assert "not running, but killed; there is nothing to stop here; if it goes on on not-" in (
        capsys.readouterr().err
    )


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


def test_hooks_that_are_no_python_are_refused_before_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ["train", "--background", "--run-name", "a"]
    assert main(train) == 2
    assert "no file callbacks.py" in capsys.readouterr().err
    for text, said in (
        ("x = '\\d'\n\ndef create_model(\n", "callbacks.py:3: SyntaxError: '(' was never closed"),
        ("x = 1\0", "null bytes"),
    ):
        Path("callbacks.py").write_text(text)
        assert main(train) == 2
        out, err = capsys.readouterr()
        assert said in err and not out and err.count("\n") == 1
        assert not Path("runs").exists()


def test_workers_that_cannot_be_are_refused_before_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").write_text(source_of())
    words = ("--background", "--workers", "3", "--batch-size", "32", "--steps", "3")
    assert main(["train", *words]) == 2
    assert "batch_size: 32 cannot be shared out evenly over 3" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_folder_that_the_background_cannot_write_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").write_text(source_of())
    made = Path.mkdir

    def read_only(path: Path, *args: Any, **more: Any) -> None:
        if "runs" in path.parts:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        made(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", read_only)
    words = ("--background", "--run-name", "a", "--batch-size", "8", "--steps", "3")
    assert main(["train", *words]) == 2
    assert capsys.readouterr().err == (
        "error: runs/a: the run cannot be started in the background: Read-only file system; choose "
        "another runs_dir or run_name.\n"
    )


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
