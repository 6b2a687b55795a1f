"""Killed at random moments and started again, a run is the one that was never interrupted."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.killed import PAUSE, Moment, Project, draw_moments, train_and_kill

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]


def test_one_process(tmp_path: Path) -> None:
    project = Project(tmp_path, steps=300).make()
    startup = project.train_whole("whole")
    for run in train_and_kill(project, draw_moments(3, startup), kills=10, seed=3):
        project.compare(run, "whole")


def until_none_is_left(project: Project) -> None:
    limit = time.monotonic() + 60
    while project.processes():
        assert time.monotonic() < limit, f"still running: {project.processes()}"
        time.sleep(0.05)


@pytest.mark.cluster
def test_a_cluster(tmp_path: Path) -> None:
    """Its supervisor is terminated, killed and interrupted, then its workers are killed."""
    project = Project(tmp_path, steps=60, workers=2).make()
    startup = project.train_whole("whole")
    assert project.processes() == []
    for moment, number, code in (
        (Moment("step", 0.3), signal.SIGTERM, 143),
        (Moment("start", 1.5), signal.SIGKILL, -signal.SIGKILL),
        (Moment("file", 0.01, 3), signal.SIGINT, 130),
    ):
        process = project.start("killed-1", PAUSE)
        assert moment.wait(project, "killed-1", process)
        process.send_signal(number)
        assert process.wait() == code
        until_none_is_left(project)
    plan = iter([Moment("start", 0.3 * startup), Moment("step", 0.2), Moment("file", 0.005, 5)])
    assert train_and_kill(project, plan, kills=3, seed=1) == ["killed-1"]
    until_none_is_left(project)
    project.compare("killed-1", "whole")
