"""Signals and kills: what a supervisor passes on, and that no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ctl_core.cluster.signals import SAME_SIGNAL
from tests.helpers.workers import alive, folder, pids, run, start, until

__all__ = ["folder"]

# Notes each signal; ends after `most` of them, as the engine does after saving.
LISTENER = """
received = []


def note(number, _):
    received.append(number)
    Path(f"got-{index}-{len(received)}").write_text(str(number))


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
Path(f"ready-{index}").touch()
while len(received) < most:
    time.sleep(0.01)
time.sleep(0.3)
assert len(received) == most, received
print("saved", flush=True)
sys.exit(128 + received[0])
"""


def ready(count: int = 2) -> bool:
    return all(Path(f"ready-{index}").exists() for index in range(count))


def test_a_signal_is_passed_on_once() -> None:
    number = signal.SIGINT
    parent = start("most = 1" + LISTENER, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(ready)
    parent.send_signal(number)
    assert parent.communicate() == (b"saved\n", b"")
    assert parent.returncode == 128 + number
    assert [Path(f"got-{index}-1").read_text() for index in (0, 1)] == [str(int(number))] * 2
    assert len(pids()) == 2


def test_workers_that_do_not_stop_are_killed_after_a_second_sigint() -> None:
    parent = start("most = 9" + LISTENER, settings="signal_grace=0.1", stdout=subprocess.PIPE)
    until(ready)
    parent.send_signal(signal.SIGTERM)
    until(lambda: Path("got-0-1").exists() and Path("got-1-1").exists())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        parent.send_signal(number)
        time.sleep(0.05)
    time.sleep(SAME_SIGNAL)
    assert parent.poll() is None and not Path("got-0-3").exists()
    assert Path("got-1-2").read_text() == str(int(signal.SIGINT))
    parent.send_signal(signal.SIGINT)
    parent.communicate()
    assert parent.returncode == 130
    assert not any(map(alive, pids())) and len(pids()) == 2


def test_a_signal_before_a_worker_listens(capfd: pytest.CaptureFixture[str]) -> None:
    parent = start("Path(f'ready-{index}').touch()\ntime.sleep(600)")
    until(ready)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait() == 143 and len(pids()) == 2
    assert capfd.readouterr().err == ""


def test_nothing_is_started_again_after_a_signal() -> None:
    body = LISTENER.replace("sys.exit(128", "os.kill(os.getpid(), 9) if index else sys.exit(128")
    parent = start("most = 1" + body, stdout=subprocess.PIPE)
    until(ready)
    parent.send_signal(signal.SIGTERM)
    assert b"worker 1 was killed by SIGKILL" in parent.communicate()[0]
    assert parent.returncode == 143 and len(pids()) == 2


def test_no_process_is_left_when_the_supervisor_is_killed() -> None:
    body = """
child = subprocess.Popen(["sleep", "600"])
(Path("pids") / f"child-{child.pid}").touch()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""
    parent = start(body, 3)
    until(lambda: len(pids()) == 6)
    assert all(map(alive, pids()))
    parent.kill()
    parent.wait()
    until(lambda: not any(map(alive, pids())))


def test_what_a_worker_started_ends_with_it() -> None:
    body = """
child = subprocess.Popen(["sleep", "600"])
(Path("pids") / f"child-{child.pid}").touch()
print("done")
"""
    assert run(body) == 0
    until(lambda: not any(map(alive, pids())))
    assert len(pids()) == 4


def test_workers_of_the_command_line_die_with_it() -> None:
    """Each gets the same command line and one name, and dies while it is importing."""
    Path("callbacks.py").write_text(
        "import os, sys, time\n"
        "open(f'pids/x-{os.getpid()}', 'w').write(' '.join(sys.argv[1:]))\n"
        "time.sleep(600)\n"
    )
    argv = ["train", "--workers", "2", "--steps", "1"]
    parent = subprocess.Popen([sys.executable, "-m", "ctl_core", *argv])
    until(lambda: len(pids()) == 2 and all(p.read_text() for p in Path("pids").iterdir()))
    (name,) = os.listdir("runs")
    for path in Path("pids").iterdir():
        assert path.read_text().split() == [*argv, "--workers", "2", "--run-name", name]
    parent.kill()
    parent.wait()
    until(lambda: not any(map(alive, pids())))
