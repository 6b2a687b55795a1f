"""Killed at random moments and started again, a run is the one that was never interrupted.

scripts/kill_test.py does the same a hundred times.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from scripts.kill_test import Moment, moments, train_and_kill, train_whole
from scripts.killed_project import Project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

# Kills in start-up cost less than those that wait for it to end.
SHARES = (25, 30, 10, 25, 10)
PAUSE = "--hparams.pause=0.02"


def test_one_process(tmp_path: Path) -> None:
    project = Project(tmp_path, steps=300).make()
    startup = train_whole(project, "whole")
    runs = train_and_kill(project, moments(3, startup, SHARES), kills=10, seed=3, say=print)
    for run in runs:
        print(project.compare(run, "whole"))


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def until_none_is_left(project: Project) -> None:
    limit = time.monotonic() + 60
    while project.processes():
        assert time.monotonic() < limit, f"still running: {project.processes()}"
        time.sleep(0.05)


@pytest.mark.cluster
def test_a_cluster(tmp_path: Path) -> None:
    """Its supervisor is terminated, killed and interrupted, then its workers are killed."""
    project = Project(tmp_path, steps=60, workers=2).make()
    startup = train_whole(project, "whole")
    assert project.processes() == []
    for moment, number, code in (
        (Moment("step", 0.3), signal.SIGTERM, 143),
        (Moment("start", 1.5), signal.SIGKILL, -signal.SIGKILL),
        (Moment("file", 0.01, 3), signal.SIGINT, 130),
    ):
        process = project.start("killed-1", PAUSE)
        assert moment.wait(project, "killed-1", time.time(), partial(has_ended, process))
        process.send_signal(number)
        assert process.wait() == code
        until_none_is_left(project)
    plan = iter([Moment("start", 0.3 * startup), Moment("step", 0.2), Moment("file", 0.005, 5)])
    runs = train_and_kill(project, plan, kills=3, seed=1, say=print, supervisor=0)
    until_none_is_left(project)
    assert runs == ["killed-1"]
    print(project.compare("killed-1", "whole"))
