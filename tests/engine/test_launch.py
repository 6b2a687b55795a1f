"""The supervisor of a cluster on this machine, with workers of a few lines of plain Python."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ctl_core
from ctl_core.__main__ import main
from ctl_core.cluster import supervisor
from ctl_core.cluster.gpus import share_gpus, visible_gpus
from ctl_core.cluster.signals import SAME_SIGNAL
from ctl_core.cluster.supervisor import End, free_ports, judge, supervise
from ctl_core.errors import PeerLost, SetupError
from ctl_core.settings import Config
from ctl_core.tools import commands

ROOT = Path(__file__).parents[2]
RUN = Path("runs/a")

# What every fake worker begins with. `start` counts from 1; `pids/` has a file per process.
PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from ctl_core.cluster.supervisor import die_with_supervisor

die_with_supervisor()
place = json.loads(os.environ["TF_CONFIG"])
index = place["task"]["index"]
start = len(list(Path("pids").glob(f"{index}-*"))) + 1
(Path("pids") / f"{index}-{os.getpid()}").touch()


def wait_for(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)


"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder, in which workers find the engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES", supervisor.PIPE):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pids").mkdir()
    return tmp_path


def fake(body: str) -> list[str]:
    """Returns the command of a worker that does this."""
    Path("fake.py").write_text(PREAMBLE + body)
    return [sys.executable, "fake.py"]


def run(body: str, workers: int = 2, **settings: Any) -> int:
    return supervise(fake(body), RUN, workers, **{"peer_grace": 60, **settings})


def start(body: str, workers: int = 2, settings: str = "", **how: Any) -> subprocess.Popen[bytes]:
    """Starts a supervisor of its own process."""
    program = (
        "import sys; from pathlib import Path; from ctl_core.cluster.supervisor import supervise; "
        f"sys.exit(supervise({fake(body)!r}, Path({str(RUN)!r}), {workers}, peer_grace=0.3, "
        f"{settings}))"
    )
    return subprocess.Popen([sys.executable, "-c", program], **how)


def log(worker: int) -> str:
    return (RUN / (f"worker-{worker}.log" if worker else "train.log")).read_text()


def pids() -> list[int]:
    return [int(path.name.split("-")[1]) for path in Path("pids").iterdir()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")  # one that nobody waits for is not alive
        return not stat.parents[1].joinpath("self").exists() or (
            stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
        )
    except (ProcessLookupError, FileNotFoundError):
        return False


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def test_the_supervisor_does_not_wait_for_tensorflow() -> None:
    program = "import sys, ctl_core.cluster.supervisor; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_each_worker_gets_its_place_and_its_log(capfd: pytest.CaptureFixture[str]) -> None:
    body = """
Path(f"place-{index}").write_text(json.dumps([place, os.environ.get("SUPERVISOR_PIPE")]))
print("out of", index)
print("err of", index, file=sys.stderr)
assert sys.stdin.read() == "" and os.getpgrp() == os.getpid()
"""
    assert run(body, 3) == 0
    places = [json.loads(Path(f"place-{index}").read_text()) for index in range(3)]
    addresses = places[0][0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    for index, (place, pipe) in enumerate(places):
        assert place["cluster"] == {"worker": addresses} and pipe.isdigit()
        assert place["task"] == {"type": "worker", "index": index}
        first, *rest = log(index).splitlines()
        assert re.fullmatch(rf"--- [\d :-]+ worker {index}, start 1 ---", first)
        assert sorted(rest) == ([f"err of {index}", f"out of {index}"] if index else [])
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out of 0\n", "err of 0\n")
    assert supervisor.PIPE not in os.environ and "TF_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("ends", "verdict", "decides"),
    [
        ([(0, 0), (1, 0)], "done", (0, 0)),
        ([(1, 0), (0, 0)], "done", (0, 0)),
        ([(1, 143), (0, 143)], "done", (0, 143)),
        ([(0, 1), (1, 75)], "failed", (0, 1)),
        ([(0, 75), (1, 2)], "failed", (1, 2)),
        ([(2, -9), (1, 1), (0, 75)], "failed", (1, 1)),
        ([(2, 2), (1, 1)], "failed", (2, 2)),
        ([(1, 1), (0, 2)], "failed", (0, 2)),
        ([(0, 0), (1, 1)], "failed", (1, 1)),
        ([(0, 75), (1, -9)], "crashed", (1, -9)),
        ([(0, -6), (1, -11), (2, 75)], "crashed", (1, -11)),
        ([(0, 75), (1, -6)], "crashed", (1, -6)),
        ([(0, 0), (1, 75)], "crashed", (1, 75)),
        ([(0, 143), (1, -15)], "crashed", (1, -15)),
        ([(1, 3)], "crashed", (1, 3)),
    ],
)
def test_who_decides(ends: list[tuple[int, int]], verdict: str, decides: tuple[int, int]) -> None:
    assert judge([End(*end) for end in ends]) == (verdict, End(*decides))


def test_how_an_end_is_told() -> None:
    assert str(End(1, -9)) == "worker 1 was killed by SIGKILL"
    assert str(End(1, -50)) == "worker 1 was killed by signal 50"
    assert str(End(2, 3)) == "worker 2 ended with exit code 3"
    assert str(End(0, PeerLost.exit_code)) == "worker 0 lost another worker"


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


@pytest.mark.parametrize("most", [0, 1])
def test_restarts_are_used_up(most: int, capfd: pytest.CaptureFixture[str]) -> None:
    body = "sys.exit(75) if index else os.kill(os.getpid(), signal.SIGSEGV)"
    assert run(body, max_restarts=most) == 1
    shown = capfd.readouterr()
    assert shown.out.count("warning: worker 0 was killed by SIGSEGV") == most
    assert shown.err == (
        f"error: worker 0 was killed by SIGSEGV (runs/a/train.log), and max_restarts is {most}; "
        "giving up.\n"
    )
    assert len(pids()) == 2 * (most + 1)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once(number: signal.Signals) -> None:
    parent = start("most = 1" + LISTENER, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(ready)
    parent.send_signal(number)
    assert parent.communicate() == (b"saved\n", b"")
    assert parent.returncode == 128 + number
    assert [Path(f"got-{index}-1").read_text() for index in (0, 1)] == [str(int(number))] * 2
    assert len(pids()) == 2


def test_a_second_signal_is_passed_on_too() -> None:
    parent = start("most = 2" + LISTENER)
    until(ready)
    parent.send_signal(signal.SIGTERM)
    until(lambda: Path("got-0-1").exists() and Path("got-1-1").exists())
    parent.send_signal(signal.SIGINT)
    assert parent.wait() == 143
    assert Path("got-1-2").read_text() == str(int(signal.SIGINT))


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_workers_that_do_not_stop_are_killed_after_a_second_sigint(first: signal.Signals) -> None:
    parent = start("most = 9" + LISTENER, settings="signal_grace=0.1", stdout=subprocess.PIPE)
    until(ready)
    parent.send_signal(first)
    until(lambda: Path("got-0-1").exists() and Path("got-1-1").exists())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        parent.send_signal(number)
        time.sleep(0.05)
    time.sleep(SAME_SIGNAL)
    assert parent.poll() is None and not Path("got-0-3").exists()
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


def test_a_marker_that_was_handed_down_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("fake.py", "w") as file:
        for value in ("", "x", "987654", str(file.fileno())):
            monkeypatch.setenv(supervisor.PIPE, value)
            supervisor.die_with_supervisor()


def test_output_to_a_reader_that_leaves_ends_the_cluster() -> None:
    body = """
Path(f"ready-{index}").touch()
try:
    while True:
        print("x" * 1000, flush=True)
        time.sleep(0.01)
except BrokenPipeError:
    os._exit(1)
"""
    parent = start(body, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout and parent.stderr
    until(ready)
    parent.stdout.read(10)
    parent.stdout.close()
    assert parent.wait() == 1
    assert parent.stderr.read() == b""
    assert len(pids()) == 2 and not any(map(alive, pids()))


def test_without_standard_streams() -> None:
    arguments = [sys.executable, "-c", "import launch_it"]
    Path("launch_it.py").write_text(
        "import sys; from pathlib import Path; from ctl_core.cluster.supervisor import supervise; "
        f"sys.exit(supervise({fake('print(index)')!r}, Path({str(RUN)!r}), 2))"
    )
    shell = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *arguments])
    assert shell.returncode == 0
    assert log(1).endswith("\n1\n")


def read_terminal(terminal: int, parent: subprocess.Popen[bytes]) -> bytes:
    shown = b""
    while True:
        try:
            if select.select([terminal], [], [], 60)[0] and (data := os.read(terminal, 1024)):
                shown += data
                continue
        except OSError:
            pass
        assert parent.wait() is not None
        return shown


def test_the_chief_has_a_terminal_where_the_supervisor_has_one() -> None:
    body = r"""
from rich.progress import Progress

assert sys.stdout.isatty() == sys.stderr.isatty() == (index == 0)
if index:
    sys.exit()
print("width", os.get_terminal_size(1).columns)
with Progress() as progress:
    task = progress.add_task("steps", total=50)
    for step in range(50):
        progress.update(task, completed=step + 1, refresh=True)
        if step == 20:
            progress.console.print("a [bold]message[/bold]")
sys.stdout.write("\x1b[?25lcut off")
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 91, 0, 0))
    environ = {**os.environ, "TERM": "xterm"}
    parent = start(body, 2, "max_restarts=0", stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    shown = read_terminal(ours, parent)
    os.close(ours)
    assert parent.returncode == 1
    assert shown.startswith(b"width 91\r\n")
    assert shown.count(b"steps") > 20, "the line is alive"
    # What the killed chief left is put right before the supervisor's own line.
    assert b"cut off\x1b[?25h\r\nerror: worker" in shown


def test_a_run_is_supervised_once() -> None:
    first = start("most = 1" + LISTENER)
    until(ready)
    before = [log(0), log(1)]
    with pytest.raises(SetupError, match="runs/a: another process is training this run; stop it"):
        run("print('second')")
    assert [log(0), log(1)] == before and len(pids()) == 2
    first.terminate()
    assert first.wait() == 143
    assert run("") == 0


def test_a_run_that_is_trained_in_one_process_is_left_alone() -> None:
    RUN.mkdir(parents=True)
    with open(RUN / "train.log", "w+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SetupError, match="another process is training this run"):
            run("")
    assert run("") == 0 and len(pids()) == 2


def test_a_folder_that_cannot_be_written() -> None:
    Path("runs").write_text("")
    with pytest.raises(SetupError, match=r"runs/a: the run folder cannot be written \(runs"):
        run("")
    Path("runs").unlink()
    for index, words in ((1, "cannot be written"), (2, "a worker cannot be started")):
        (RUN / f"worker-{index}.log").mkdir(parents=True)
        with pytest.raises(SetupError, match=rf"{words}.*worker-{index}.log"):
            run("time.sleep(600)", 3)
        (RUN / f"worker-{index}.log").rmdir()
    assert not any(map(alive, pids()))


def test_ports_are_free_and_differ() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.socket() as each:
            each.bind(("127.0.0.1", port))


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")


def test_gpus_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for named, found in {
        "0,1": ["0", "1"],
        " 2 , 3": ["2", "3"],
        "GPU-ab,MIG-cd": ["GPU-ab", "MIG-cd"],
        "1,-1,2": ["1"],
        "-1": [],
        "": [],
        "NoDevFiles": [],
    }.items():
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}) == found
    nvidia_smi(folder, monkeypatch, "echo $1 >asked; echo No devices were found; exit 6")
    assert visible_gpus({}) == []
    assert Path("asked").read_text() == "--list-gpus\n"
    listed = r"GPU 0: A100 (UUID: GPU-1)\n  MIG 1g Device  0: (UUID: MIG-2)\nGPU 1: A100 (U)\n"
    nvidia_smi(folder, monkeypatch, f"printf '{listed}'")
    assert visible_gpus({}) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setenv("PATH", str(folder))
    assert visible_gpus({}) == []


def test_gpus_are_shared_out() -> None:
    assert share_gpus(["0", "1", "2", "3"], 2) == ["0,1", "2,3"]
    assert share_gpus(["GPU-a", "GPU-b"], 2) == ["GPU-a", "GPU-b"]
    with pytest.raises(SetupError, match=r"workers: 3 workers cannot share 4 GPUs evenly; take a"):
        share_gpus(["0", "1", "2", "3"], 3)
    with pytest.raises(SetupError, match="2 workers cannot share 1 GPU evenly"):
        share_gpus(["0"], 2)


@pytest.mark.parametrize(
    ("gpus", "devices", "shares"),
    [(4, 1, ["0,1", "2,3"]), (3, 2, ["", ""]), (0, 1, [None, None])],
)
def test_each_worker_sees_its_gpus(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    devices: int,
    shares: list[str | None],
) -> None:
    nvidia_smi(folder, monkeypatch, "".join(f"echo 'GPU {i}: A100'\n" for i in range(gpus)))
    command = fake(
        "Path(f'gpus-{index}').write_text(json.dumps(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    )
    monkeypatch.setattr(sys, "executable", "unused")
    monkeypatch.setattr(
        supervisor, "supervise", lambda _, *rest, **more: supervise(command, *rest, **more)
    )
    config = Config(workers=2, virtual_devices=devices, run_name="a")
    assert supervisor.start_cluster(["train"], config) == 0
    assert [json.loads(Path(f"gpus-{i}").read_text()) for i in (0, 1)] == shares


def test_settings_that_cannot_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(**settings: Any) -> str:
        with pytest.raises(SetupError) as error:
            supervisor.start_cluster(["train"], Config(run_name="a", **settings))
        return str(error.value)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "10 cannot be shared out evenly over 6 replicas; take a multiple of 6" in message(
        batch_size=10, workers=3, virtual_devices=2
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert "2 workers cannot share 3 GPUs evenly" in message(workers=2)
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert "TF_CONFIG in the environment tells this process to join a cluster" in message(workers=2)
    assert not RUN.exists()


def test_from_python_there_is_no_supervisor() -> None:
    with pytest.raises(SetupError, match=r"the command line: ./train.sh --workers 2$"):
        ctl_core.train(SimpleNamespace(), Config(steps=1, workers=2))


def ctl(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ctl_core", *argv]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_project_that_cannot_start_is_one_line() -> None:
    done = ctl("train", "--workers", "2", "--steps", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: no file callbacks.py in \S+; run this .*\n", done.stderr)
    assert not Path("runs").exists()
    Path("callbacks.py").write_text("import sys\n\n1 / 0\n")
    done = ctl("train", "--workers", "2", "--steps", "1", "--run-name", "a")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: callbacks.py:3: ZeroDivisionError: division by zero\n"
    assert log(1).endswith(done.stderr)


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


def test_a_trained_run_is_used_in_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(_: object, config: Config, options: object) -> None:
        assert config.workers == 1 and "TF_CONFIG" not in os.environ

    RUN.mkdir(parents=True)
    (RUN / "config.yaml").write_text("steps: 1\nworkers: 3\n")
    Path("callbacks.py").write_text("")
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setattr(commands, "evaluate", evaluate)
    assert main(["evaluate", "--run-name", "a"]) == 0
