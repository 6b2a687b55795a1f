"""``evaluate --watch``: each checkpoint of a run that another process trains, until that ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from ctl_core.__main__ import main
from ctl_core.commands import use
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import EVALUATED

CONFIG = "steps: 8\nbatch_size: 16\nckpt_every: 2\neval_every: 2\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has ended, at step 8, with checkpoints at 2, 4, 6 and 8."""
    (tmp_path / "callbacks.py").write_text(EVALUATED)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(use, "POLL", 0.05)
    monkeypatch.setattr(use, "GRACE", 0.5)
    assert main(["train", "--run-name", "a"]) == 0
    return tmp_path


def lines(run: str, name: str = "watch.jsonl", split: str = "watch") -> list[dict[str, Any]]:
    text = Path("runs", run, name).read_text()
    return [line for line in map(json.loads, text.splitlines()) if line.pop("split") == split]


def tags(folder: str) -> list[tuple[int, str]]:
    (file,) = Path(folder).glob("events*")
    events = tf.compat.v1.train.summary_iterator(str(file))
    return [(event.step, value.tag) for event in events for value in event.summary.value]


def close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return found == [pytest.approx(line, rel=1e-6) for line in expected]


def test_an_ended_run_is_evaluated_from_its_first_checkpoint_on(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["evaluate", "--watch"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "runs/a: watching; the values go to runs/a/watch.jsonl."
    assert [line.split("  ")[0] for line in said[1:-1]] == ["step 2", "step 4", "step 6", "step 8"]
    assert all(line.split("  ")[1].startswith("eval: loss ") for line in said[1:-1])
    assert said[-1] == "runs/a: has ended; checkpoints evaluated: 4."
    assert close(lines("a"), lines("a", "metrics.jsonl", "eval"))
    assert tags("runs/a/tb/watch") == [(n, t) for n in (2, 4, 6, 8) for t in ("loss", "error")]
    assert {path: path.read_bytes() for path in before} == before
    new = {str(path) for path in Path("runs").rglob("*") if path.is_file()} - set(map(str, before))
    assert {name.split("/events")[0] for name in new} == {"runs/a/watch.jsonl", "runs/a/tb/watch"}
    assert main(["evaluate", "--watch"]) == 0  # once more, there is nothing new
    assert capsys.readouterr().out.endswith("has ended; checkpoints evaluated: 0.\n")


SLOW_STEPS = """
import time


def pause():
    time.sleep(0.02)


every_steps = {1: pause}
"""


@pytest.mark.slow
def test_a_run_of_another_process_that_is_killed_and_started_again(project: Path) -> None:
    Path("callbacks.py").write_text(EVALUATED + SLOW_STEPS)
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    flags = ["--run-name", "live", "--steps", "300", "--ckpt-every", "20"]

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ctl_core", *words]
        return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE)

    trainer = start("train", *flags)
    while not Path("runs/live/config.yaml").exists():
        time.sleep(0.05)
    watcher = start("evaluate", "--watch", "--run-name", "live")
    while not Path("runs/live/ckpt/engine/ckpt-40.json").exists():
        time.sleep(0.02)
    trainer.kill()
    trainer.wait()
    trainer = start("train", *flags)
    assert trainer.wait(600) == 0
    out, _ = watcher.communicate(timeout=600)
    assert watcher.returncode == 0 and "live: has ended; checkpoints evaluated: " in out
    assert [line["step"] for line in lines("live")] == list(range(20, 301, 20))
    expected = {line["step"]: line for line in lines("live", "metrics.jsonl", "eval")}
    assert close(lines("live"), [expected[step] for step in range(20, 301, 20)])
