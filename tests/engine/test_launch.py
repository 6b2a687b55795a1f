"""Tests of starting a cluster: the local supervisor, TF_CONFIG, and waiting for other processes.

The workers of the supervisor are short Python programs that do not train.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import ctl_core
from ctl_core.__main__ import main
from ctl_core.cluster import strategy, supervisor
from ctl_core.cluster import task as tasks
from ctl_core.cluster.signals import SAME_SIGNAL
from ctl_core.cluster.task import Task, read_task
from ctl_core.run.errors import PeerLost, RunError, SetupError
from ctl_core.run.settings import Config
from tests.helpers import lean
from tests.helpers.waiting import wait_until

Captured = pytest.CaptureFixture[str]
CHILD = """
child = subprocess.Popen(["sleep", "600"])
(Path("pids") / f"child-{child.pid}").touch()
"""
RUN = Path("runs/a")

# The first lines of every fake worker. `start` counts the starts of a worker, beginning with 1.
# The folder `pids/` contains a file for each process.
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
    """Returns an empty project folder. Workers that start in the folder can import the engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", lean.PYTHONPATH)
    for name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pids").mkdir()
    return tmp_path


def fake(body: str) -> list[str]:
    """Writes a fake worker that executes ``body``, and returns its command."""
    Path("fake.py").write_text(PREAMBLE + body)
    return [sys.executable, "fake.py"]


def run(body: str, workers: int = 2, **settings: Any) -> int:
    return supervisor.supervise(fake(body), RUN, workers, **{"peer_grace": 60, **settings})


def start(body: str, workers: int = 2, **how: Any) -> subprocess.Popen[bytes]:
    """Starts a supervisor in a separate process."""
    program = (
        "import sys; from pathlib import Path; from ctl_core.cluster.supervisor import supervise; "
        f"sys.exit(supervise({fake(body)!r}, Path({str(RUN)!r}), {workers}, peer_grace=0.3))"
    )
    return subprocess.Popen([sys.executable, "-c", program], **how)


def log(worker: int) -> str:
    return (RUN / (f"worker-{worker}.log" if worker else "train.log")).read_text()


def pids() -> list[int]:
    return [int(path.name.split("-")[1]) for path in Path("pids").iterdir()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")  # The file shows whether the process is a zombie.
        return not stat.parents[1].joinpath("self").exists() or (
            stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
        )
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_each_worker_gets_its_place_and_its_log(capfd: Captured) -> None:
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
        task = {"type": "worker", "index": index}
        assert place == {"cluster": {"worker": addresses}, "task": task, "shares_gpus": True}
    assert sorted(log(2).splitlines()) == ["err of 2", "out of 2"]
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out of 0\n", "err of 0\n")
    assert supervisor.PIPE not in os.environ
    assert "TF_CONFIG" not in os.environ


def test_the_chief_says_once_that_ports_are_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If processes may be on other machines, the line also says how to protect the ports.

    A single process opens no port, so it prints no line.
    """
    monkeypatch.setattr(strategy, "wait_for_others", lambda _: None)
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", lambda _: None)

    def read_lines(processes: int, index: int, shares_gpus: bool = False) -> list[str]:
        strategy._join_cluster.cache_clear()
        cluster = {"worker": [f"localhost:{n + 1}" for n in range(processes)]}
        task = {"type": "worker", "index": index}
        place = {"cluster": cluster, "task": task, "shares_gpus": shares_gpus}
        monkeypatch.setenv("TF_CONFIG", json.dumps(place))
        for _ in range(2):
            strategy.prepare(Config(run_name="a"))
        strategy._join_cluster.cache_clear()
        return capsys.readouterr().out.splitlines()

    (machines,) = read_lines(2, 0)
    (workers,) = read_lines(2, 0, shares_gpus=True)
    for line in (machines, workers):
        assert line.startswith("cluster: ")
        assert "no password" in line
        assert "SECURITY.md" in line
    assert "no encryption" in machines
    assert "only these machines" in machines
    assert len(workers) < len(machines)
    assert read_lines(2, 1) == read_lines(1, 0) == []


def test_workers_share_out_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker sees only its share of the GPUs. With virtual devices, it sees only the CPU."""
    with pytest.raises(SetupError, match=r"the command line: ./train.sh --workers 2$"):
        ctl_core.train(SimpleNamespace(), Config(steps=1, workers=2))
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(4)]
    seen: list[Any] = []
    monkeypatch.setattr(strategy, "wait_for_others", lambda _: None)
    monkeypatch.setattr(
        tf.distribute,
        "MultiWorkerMirroredStrategy",
        lambda resolver: seen.append(resolver.num_accelerators()),
    )
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: gpus if kind == "GPU" else ["cpu"]
    )
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: seen[0][0] if seen else gpus)
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda *_: None)
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda *arguments: seen.append(arguments)
    )

    def prepare(workers: int, devices: int = 1, shares: bool = True) -> list[Any]:
        seen.clear()
        strategy._join_cluster.cache_clear()
        cluster = {"worker": [f"localhost:{n + 1}" for n in range(workers)]}
        place = {"cluster": cluster, "task": {"type": "worker", "index": 1}, "shares_gpus": shares}
        monkeypatch.setenv("TF_CONFIG", json.dumps(place))
        strategy.prepare(Config(run_name="a", virtual_devices=devices))
        return list(seen)

    grown = [(gpu, True) for gpu in gpus]
    assert prepare(2) == [(gpus[2:], "GPU"), *grown[2:], {"GPU": 2}]
    assert prepare(2, devices=2) == prepare(2, 2, shares=False) == [([], "GPU"), {"GPU": 0}]
    with pytest.raises(SetupError, match=r"workers: 3 workers cannot share 4 GPUs evenly; use"):
        prepare(3)
    strategy._join_cluster.cache_clear()


@pytest.mark.parametrize(("codes", "expected"), [((143, 143), 143), ((1, 75), 1), ((2, 0), 2)])
def test_exit_codes(codes: tuple[int, int], expected: int) -> None:
    """The supervisor returns the exit code of a failed worker, and child processes end, too."""
    assert run(f"{CHILD}sys.exit({codes}[index])") == expected
    assert len(pids()) == 4, "started once"
    wait_until(lambda: not any(map(alive, pids())))


def test_a_crash_starts_all_again_on_other_ports(capfd: Captured) -> None:
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
    lost = "warning: worker 1 was killed by {} (see runs/a); restarting from the last "
    assert capfd.readouterr().out.splitlines() == [
        "start 1",
        lost.format("SIGKILL") + "checkpoint (1 of 3)",
        "start 2",
        lost.format("SIGABRT") + "checkpoint (2 of 3)",
        "start 3",
    ]
    addresses = Path("addresses").read_text().split()
    starts = [set(addresses[i : i + 4]) for i in (0, 4, 8)]
    assert all(len(each) == 2 for each in starts)
    assert len(set.union(*starts)) > 2
    assert len(pids()) == 6
    assert not any(map(alive, pids()))


def test_supervisor_gives_up_after_the_last_restart(capfd: Captured) -> None:
    """The message names all workers that ended, even a worker that ended because of another one."""
    body = "sys.exit(75) if index else os.kill(os.getpid(), signal.SIGSEGV)"
    with pytest.raises(RunError, match=r"worker 0 was killed by SIGSEGV.* max_restarts is 1"):
        run(body, max_restarts=1)
    (line,) = capfd.readouterr().out.splitlines()
    assert "worker 0 was killed by SIGSEGV" in line
    assert "worker 1 ended with exit code 75" in line
    assert len(pids()) == 4


def test_failure_of_a_hook_is_printed_once(capfd: Captured) -> None:
    shows = 'print("Traceback ...\\nerror: hook broken in", index, file=sys.stderr)\n'
    assert run(shows + "sys.exit(1)") == 1
    assert capfd.readouterr().err.count("error:") == 1
    assert run(f"if index: {shows}if index: sys.exit(2)\ntime.sleep(600)", peer_grace=0.1) == 2
    assert capfd.readouterr().err == "error: worker 1 ended with exit code 2 (see runs/a)\n"
    assert len(pids()) == 4


# ---- Signals and kills

# A worker that records each signal. It ends after `most` signals, as the engine does after saving.
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
if index and most == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(128 + received[0])
"""


def ready() -> bool:
    return all(Path(f"ready-{index}").exists() for index in (0, 1))


def test_a_signal_is_passed_on_once_and_nothing_is_started_again() -> None:
    """After a signal, no worker is restarted, even if a worker crashes."""
    parent = start("most = 1" + LISTENER)
    wait_until(ready)
    parent.send_signal(signal.SIGINT)
    assert parent.wait() == 130
    assert [Path(f"got-{index}-1").read_text() for index in (0, 1)] == ["2", "2"]
    assert len(pids()) == 2
    parent = start("Path(f'ready-{index}').write_text('again')\ntime.sleep(600)")
    wait_until(lambda: all(Path(f"ready-{index}").read_text() for index in (0, 1)))
    parent.send_signal(signal.SIGTERM)  # These workers do not handle the signal.
    assert parent.wait() == 143
    assert len(pids()) == 4


def test_workers_that_do_not_stop_are_killed_after_a_second_sigint() -> None:
    parent = start("most = 9" + LISTENER, stderr=subprocess.DEVNULL)
    wait_until(ready)
    parent.send_signal(signal.SIGTERM)
    wait_until(lambda: Path("got-0-1").exists() and Path("got-1-1").exists())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        parent.send_signal(number)
        time.sleep(0.05)
    time.sleep(SAME_SIGNAL)
    assert parent.poll() is None
    assert not Path("got-0-3").exists()
    assert Path("got-1-2").read_text() == "2"
    parent.send_signal(signal.SIGINT)
    assert parent.wait() == -signal.SIGINT  # The command converts this to exit code 130.
    assert not any(map(alive, pids()))
    assert len(pids()) == 2


def test_no_process_is_left_when_the_supervisor_is_killed() -> None:
    parent = start(CHILD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)", 3)
    wait_until(lambda: len(pids()) == 6)
    assert all(map(alive, pids()))
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(alive, pids())))


# ---- Roles in TF_CONFIG, and waiting for other processes -----------------------------------------

HOSTS = ["a:1", "b:2", "c:3"]


def tf_config(cluster: object, job: str, index: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


@pytest.mark.parametrize(
    ("cluster", "job", "index", "expected"),
    [
        ({"worker": HOSTS}, "worker", 1, Task(3, 1, tuple(HOSTS))),
        ({"chief": ["d:4"], "worker": HOSTS}, "worker", "0", Task(4, 1, ("d:4", *HOSTS))),
        ({"master": ["d:4"], "worker": HOSTS}, "master", 0, Task(4, 0, ("d:4", *HOSTS))),
        # A single process needs no port, because no other process connects to it.
        ({"worker": ["here"]}, "worker", 0, Task(1, 0, ("here",))),
        (
            {"worker": ["[::1]:1", "x_y.z:65535"]},
            "worker",
            0,
            Task(2, 0, ("[::1]:1", "x_y.z:65535")),
        ),
        ({"worker": HOSTS}, "evaluator", 0, Task(kind="evaluator")),
        ({"worker": HOSTS, "ps": ["e:5"]}, "ps", 0, Task(kind="ps")),
    ],
)
def test_tf_config_tells_what_a_process_is(
    cluster: Any, job: str, index: Any, expected: Task
) -> None:
    environ = tf_config(cluster, job, index)
    assert read_task(Config(run_name="a"), environ) == expected
    assert read_task(Config(strategy="mirrored"), environ) == Task()


@pytest.mark.parametrize(
    ("cluster", "job", "index"),
    [
        ({"worker": HOSTS}, "worker", 3),
        ({"worker": HOSTS}, "chief", 0),
        ({"worker": HOSTS}, "tpu_worker", 0),
        ({"chief": ["b:2"], "worker": HOSTS}, "chief", 0),  # The address b:2 occurs twice.
        *(({"worker": HOSTS}, "worker", index) for index in (math.inf, 0.5, -1, None, True, [0])),
        *(
            ({"worker": ["a:1", address]}, "worker", 0)
            for address in ("b", "b:", ":2", "b:0", "b:99999", 2, None, "b..c:2", f"{'b' * 64}:2")
        ),
        ({"worker": "a:1"}, "worker", 0),
    ],
)
def test_a_cluster_that_cannot_train_is_refused(cluster: Any, job: str, index: object) -> None:
    with pytest.raises(SetupError, match=r"^TF_CONFIG: expected .*worker.* got [^\n]+$"):
        read_task(Config(run_name="a"), tf_config(cluster, job, index))


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "3", '{"a": ' + "1" * 5000 + "}"])
def test_a_tf_config_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match=r"^TF_CONFIG: expected [^\n]+$"):
        read_task(Config(run_name="a"), {"TF_CONFIG": text})


def test_settings_that_a_cluster_cannot_have_are_refused() -> None:
    with pytest.raises(SetupError, match="run_name: required in a cluster"):
        read_task(Config(), tf_config({"worker": HOSTS}, "worker", 1))
    with pytest.raises(SetupError, match=r"multi_worker needs TF_CONFIG .* --workers K"):
        read_task(Config(strategy="multi_worker"), {})


def test_a_ps_ends_at_once_and_an_evaluator_watches_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(
        "ctl_core.commands.use.evaluate",
        lambda _, config, **options: called.append((config.run_name, config.workers, options)),
    )
    monkeypatch.setattr("ctl_core.__main__.LONGEST", 1.0)
    monkeypatch.chdir(tmp_path)
    Path("callbacks.py").touch()
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": HOSTS}, "ps", 0)["TF_CONFIG"])
    assert main(["train", "--steps", "3"]) == 0
    assert capsys.readouterr().out == (
        "ps: gradients are summed between the workers; no parameter server is needed.\n"
    )
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": HOSTS}, "evaluator", 0)["TF_CONFIG"])
    words = ["train", "--steps", "3", "--run-name", "a"]
    assert main(words) == 75
    assert "no run to evaluate appeared at runs/a within 1 s" in capsys.readouterr().err
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text("steps: 3\nworkers: 2\n")
    assert main(words) == 0
    assert called == [("a", 1, {"checkpoint": None, "watch": True})]


def test_wait_for_peers_names_silent_addresses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tasks, "PATIENCE", 0.1)
    monkeypatch.setattr(tasks, "LONGEST", 0.5)
    task = Task(3, 0, tuple(f"127.0.0.1:{port}" for port in supervisor.find_free_ports(3)))
    with tasks._listen(task.addresses[1]):
        with pytest.raises(
            PeerLost, match=f"no answer from process 2 at {task.addresses[2]} within"
        ):
            tasks.wait_for_others(task)
        who = f"process 2 at {task.addresses[2]}"
        assert capsys.readouterr().out == f"cluster: waiting; no answer from {who}\n"
        with tasks._listen(task.addresses[2]):
            tasks.wait_for_others(task)
