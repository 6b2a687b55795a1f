"""Killed at random moments and started again, a run is the one that was never interrupted.

And clusters of which a worker fails, or a whole host: network namespaces with addresses of their
own, of which one's cable is pulled, so that nothing tells the other one but heartbeats.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.mark.cluster
def test_a_hook_raises_in_one_worker(tmp_path: Path) -> None:
    """The cluster ends at once, with one line, and leaves no process."""
    project = Project(tmp_path, steps=20, workers=2).make()
    path = tmp_path / "callbacks.py"
    raises = (
        "    if step == 3 and PLACE['task']['index'] == 1:\n        raise ValueError('broken')\n"
    )
    path.write_text(path.read_text().replace("    report(", f"{raises}    report("))
    process = project.start("a", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = (stream.decode() for stream in process.communicate(timeout=600))
    assert project.processes() == [] and process.returncode == 1
    line = r"error: (worker 0 .* 75, )?worker 1 ended with exit code 1.* \(see runs/a\)\n"
    assert re.fullmatch(line, err) and "is gone" not in out, err
    what = r"error: every_steps\[1\] \(callbacks.py:\d+\): ValueError: broken\n"
    assert re.search(what, (tmp_path / "runs/a/worker-1.log").read_text())
    log = (tmp_path / "runs/a/train.log").read_text()
    assert log.count("training, to step 20") == 1, "started once"


# ---- A host that falls silent -------------------------------------------------------------------

HOSTS = {f"ctl{os.getpid()}a": "10.213.77.1", f"ctl{os.getpid()}b": "10.213.77.2"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two hosts, joined by a cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        first, second = HOSTS
        ends = ["type", "veth", "peer", "name", "cable", "netns", second]
        ip("link", "add", "cable", "netns", first, *ends)
        for host, address in HOSTS.items():
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("cable", "lo"):
                ip("-n", host, "link", "set", device, "up")
        yield [*HOSTS]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"ip is not permitted: {error.stderr.strip()}")
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def start(project: Project) -> list[subprocess.Popen[bytes]]:
    """Starts one process on each host; their run folder is shared."""
    workers = [f"{address}:2222" for address in HOSTS.values()]
    started = []
    for index, host in enumerate(HOSTS):
        place = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environ = {**os.environ, "TF_CONFIG": json.dumps(place)}
        with (project.folder / f"lost-{index}.log").open("ab") as log:
            on_host = ["ip", "netns", "exec", host]
            how: dict[str, Any] = {"env": environ, "stdout": log, "stderr": log}
            started.append(project.start("lost", before=on_host, **how))
    return started


@pytest.mark.cluster
def test_a_host_is_lost(hosts: list[str], tmp_path: Path) -> None:
    """All end with the code of a lost peer, and the run goes on."""
    project = Project(tmp_path, steps=30).make()
    both = start(project)
    # While a checkpoint is saved, not the first one.
    assert Moment("file", 0, 12).wait(project, "lost", both[0])
    ip("-n", hosts[1], "link", "set", "cable", "down")
    try:
        assert [process.wait(timeout=300) for process in both] == [75, 75]
    finally:
        ip("-n", hosts[1], "link", "set", "cable", "up")
        for process in both:
            process.kill()
    last_words = (tmp_path / "lost-1.log").read_text().splitlines()[-1]
    assert last_words.startswith("error: another process of the cluster is gone; started again")
    assert [process.wait(timeout=600) for process in start(project)] == [0, 0]
