"""A cluster on two hosts: network namespaces with addresses of their own, and no supervisor.

One host falls silent: its cable is pulled, so that nothing tells the other one but heartbeats that
stay away, after some ten seconds. That a process dies is heard at once; see test_kills.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.killed import Moment, Project

pytestmark = pytest.mark.cluster

HOSTS = [f"ctl{os.getpid()}{letter}" for letter in "ab"]
ADDRESSES = ["10.213.77.1", "10.213.77.2"]
STEPS = 30


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def remove_hosts() -> None:
    for host in HOSTS:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", host)


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """Two hosts, joined by a cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    try:
        for host in HOSTS:
            ip("netns", "add", host)
    except subprocess.CalledProcessError as error:
        remove_hosts()
        pytest.skip(f"ip netns add is not permitted: {error.stderr.strip()}")
    try:
        ends = ["type", "veth", "peer", "name", "cable", "netns", HOSTS[1]]
        ip("link", "add", "cable", "netns", HOSTS[0], *ends)
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
            plug(host, "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        remove_hosts()


def plug(host: str, state: str) -> None:
    ip("-n", host, "link", "set", "cable", state)


def start(project: Project, run: str) -> list[subprocess.Popen[bytes]]:
    """Starts one process on each host; their run folder is shared."""
    started = []
    workers = [f"{address}:2222" for address in ADDRESSES]
    for index, host in enumerate(HOSTS):
        place = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environ = {**os.environ, "TF_CONFIG": json.dumps(place)}
        on_host = ["ip", "netns", "exec", host]
        with (project.folder / f"{run}-{index}.log").open("ab") as log:
            started.append(project.start(run, before=on_host, env=environ, stdout=log, stderr=log))
    return started


def codes(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    return [process.wait(timeout=600) for process in processes]


def test_a_host_is_lost(hosts: None, tmp_path: Path) -> None:
    project = Project(tmp_path, steps=STEPS).make()
    assert codes(start(project, "whole")) == [0, 0]

    both = start(project, "lost")
    # While a checkpoint is saved, not the first one.
    assert Moment("file", 0, 12).wait(project, "lost", both[0])
    plug(HOSTS[1], "down")
    begun = time.monotonic()
    try:
        assert codes(both) == [75, 75]
    finally:
        plug(HOSTS[1], "up")
        for process in both:
            process.kill()
    assert time.monotonic() - begun < 300

    last_words = (tmp_path / "lost-1.log").read_text().splitlines()[-1]
    assert last_words.startswith("error: another process of the cluster is gone; started again")
    assert codes(start(project, "lost")) == [0, 0]
    project.compare("lost", "whole")
