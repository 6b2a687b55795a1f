"""The supervisor of a cluster on this machine, with workers of a few lines of plain Python."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path

import pytest

from ctl_core.cluster import supervisor
from ctl_core.errors import SetupError
from tests.helpers.workers import RUN, alive, folder, log, pids, run

__all__ = ["folder"]


def test_each_worker_gets_its_place_and_its_log(capfd: pytest.CaptureFixture[str]) -> None:
    body = """
Path(f"place-{index}").write_text(json.dumps(place))
print("out of", index)
print("err of", index, file=sys.stderr)
assert sys.stdin.read() == "" and os.getpgrp() == os.getpid()
"""
    assert run(body, 3) == 0
    places = [json.loads(Path(f"place-{index}").read_text()) for index in range(3)]
    addresses = places[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    for index, place in enumerate(places):
        assert place["cluster"] == {"worker": addresses}
        assert place["task"] == {"type": "worker", "index": index}
        first, *rest = log(index).splitlines()
        assert re.fullmatch(rf"--- [\d :-]+ worker {index}, start 1 ---", first)
        assert sorted(rest) == ([f"err of {index}", f"out of {index}"] if index else [])
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out of 0\n", "err of 0\n")
    assert supervisor.PIPE not in os.environ and "TF_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((143, 143), 143), ((1, 75), 1), ((2, 0), 2), ((75, 2), 2), ((0, 1), 1)],
)
def test_exit_codes(codes: tuple[int, int], expected: int) -> None:
    assert run(f"sys.exit({codes}[index])") == expected
    assert len(pids()) == 2, "started once"


def test_a_crash_starts_all_again_on_other_ports(capfd: pytest.CaptureFixture[str]) -> None:
    body = """
with open("addresses", "a") as file:
    print(*place["cluster"]["worker"], sep="\\n", file=file)
Path(f"up-{start}-{index}").touch()
wait_for(f"up-{start}-0", f"up-{start}-1")
if index == 0:
    print(f"start {start}")
    Path(f"printed-{start}").touch()
wait_for(f"printed-{start}")
if start <= 2:
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL if start == 1 else signal.SIGABRT)
    time.sleep(600)
"""
    assert run(body, peer_grace=0.1) == 0
    shown = capfd.readouterr()
    assert shown.out.splitlines() == [
        "start 1",
        "warning: worker 1 was killed by SIGKILL (runs/a/worker-1.log); "
        "restarting from the last checkpoint (1 of 3)",
        "start 2",
        "warning: worker 1 was killed by SIGABRT (runs/a/worker-1.log); "
        "restarting from the last checkpoint (2 of 3)",
        "start 3",
    ]
    assert shown.err == ""
    assert re.findall(r"start \d(?= ---)", log(1)) == ["start 1", "start 2", "start 3"]
    assert log(0).count("restarting") == 2
    addresses = Path("addresses").read_text().split()
    starts = [set(addresses[i : i + 4]) for i in (0, 4, 8)]
    assert all(len(each) == 2 for each in starts) and len(set.union(*starts)) > 2
    assert len(pids()) == 6 and not any(map(alive, pids()))


def test_restarts_are_used_up(capfd: pytest.CaptureFixture[str]) -> None:
    body = "sys.exit(75) if index else os.kill(os.getpid(), signal.SIGSEGV)"
    assert run(body, max_restarts=1) == 1
    shown = capfd.readouterr()
    assert shown.out.count("warning: worker 0 was killed by SIGSEGV") == 1
    assert shown.err == (
        "error: worker 0 was killed by SIGSEGV (runs/a/train.log), and max_restarts is 1; "
        "giving up.\n"
    )
    assert len(pids()) == 4


def test_the_users_failure_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    shows = 'print("Traceback ...\\nerror: hook broken in", index, file=sys.stderr)\n'
    assert run(shows + "sys.exit(1)") == 1
    assert capfd.readouterr().err.count("error:") == 1
    # The chief only lost a peer; it is the other one's line that counts, and its last start's.
    assert run(f"if index: {shows}if index: sys.exit(2)\ntime.sleep(600)", peer_grace=0.1) == 2
    assert capfd.readouterr().err == ("error: worker 1: hook broken in 1 (runs/a/worker-1.log)\n")
    assert run("sys.exit(index)") == 1
    assert capfd.readouterr().err == (
        "error: worker 1 ended with exit code 1 (runs/a/worker-1.log)\n"
    )
    assert len(pids()) == 6


def test_a_run_that_is_trained_in_one_process_is_left_alone() -> None:
    RUN.mkdir(parents=True)
    with open(RUN / "train.log", "w+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SetupError, match="another process is training this run"):
            run("")
    assert run("") == 0 and len(pids()) == 2
