"""Tests that runs killed at random moments equal runs that were never interrupted.

Another test simulates a cluster that loses a host. Two network namespaces serve as hosts. The test
cuts the connection between them, so that only missing heartbeats reveal the loss.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from tests.golden import small
from tests.golden.compare import read_checkpoint
from tests.helpers import lean
from tests.helpers.rendering import ROOT
from tests.helpers.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]


CALLBACKS = (
    small.CALLBACKS
    + """
import time

from ctl_core import data, report

create_eval_dataset = small.create_eval_dataset


def create_dataset(per_replica_batch_size, config):
    examples = tf.data.Dataset.from_tensor_slices(small.data()).repeat(2)
    examples = examples.shuffle(50, seed=config.seed)

    def augment(example, seed):
        inputs, target = example
        return inputs + 0.1 * tf.random.stateless_normal(inputs.shape, seed), target

    augmented = data.with_seeds(examples, config.seed).map(augment, num_parallel_calls=2)
    return augmented.batch(per_replica_batch_size)


def create_model():
    return small.model_with(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))


def create_opt(lr):
    return keras.optimizers.Nadam(lr)


def halve(lr):
    lr.assign(lr * 0.5)


def slow(step, loss, hparams):
    report(step, loss=loss)
    time.sleep(hparams.get("pause", 0.0))


every_steps = {1: slow}
at_step = {30: halve, 60: halve}
"""
)
SETTINGS = "--batch-size=16 --ckpt-every=7 --eval-every=20 --deterministic"
PAUSE = "--hparams.pause=0.02"  # Without a pause, runs would end before most of the kills.


@dataclasses.dataclass(frozen=True)
class Project:
    """A project in a folder, which is trained for a number of steps by a number of workers."""

    folder: Path
    steps: int = 300
    workers: int = 1

    def make(self) -> Self:
        """Writes callbacks.py and returns the project."""
        (self.folder / "callbacks.py").write_text(CALLBACKS)
        return self

    def start(
        self, run: str, *flags: str, before: Sequence[str] = (), **how: Any
    ) -> subprocess.Popen[bytes]:
        """Starts training in a new process. If the run exists, it is resumed.

        Args:
            run: the name of the run
            flags: additional flags of the command
            before: a command that runs the training command, such as ``nice``
            how: keyword arguments of ``subprocess.Popen``
        """
        command = [*before, sys.executable, "-m", "ctl_core", "train", *SETTINGS.split()]
        command += [f"--steps={self.steps}", f"--run-name={run}", *flags]
        if self.workers > 1:
            command += [f"--workers={self.workers}", "--max-restarts=1000000"]
        environ = {**how.pop("env", os.environ), "PYTHONPATH": lean.PYTHONPATH}
        environ.pop("TF_CPP_MIN_LOG_LEVEL", None)  # The engine chooses the log level itself.
        with (self.folder / f"{run}.log").open("ab") as log:
            how = {"stdout": log, "stderr": log, **how}
            return subprocess.Popen(command, cwd=self.folder, env=environ, **how)

    def train_whole(self, run: str) -> float:
        """Trains without kills and returns the duration of the start-up in seconds."""
        begun, process = time.time(), self.start(run)
        Moment("step", 0).wait(self, run, process)
        startup = time.time() - begun
        assert process.wait() == 0, (self.folder / f"{run}.log").read_text()
        return startup

    def lines(self, run: str) -> list[dict[str, Any]]:
        """Reads metrics.jsonl."""
        path = self.folder / "runs" / run / "metrics.jsonl"
        return [json.loads(text) for text in path.read_text().splitlines()]

    def tensors(self, run: str) -> dict[str, bytes]:
        """Returns all values of the last checkpoint except the serialized data pipeline."""
        return {
            f"{folder}/{key}": np.asarray(value).tobytes()
            for folder in ("", "engine")
            for key, value in read_checkpoint(
                self.folder / "runs" / run, self.steps, folder
            ).items()
            if "ITERATOR" not in key
        }

    def compare(self, run: str, whole: str) -> None:
        """Asserts that two runs have equal checkpoints, bit for bit, and equal metrics."""
        expected, actual = self.tensors(whole), self.tensors(run)
        assert {
            key for key in {*expected, *actual} if expected.get(key) != actual.get(key)
        } == set()
        lines = self.lines(run)
        trained = [line["step"] for line in lines if line["split"] == "train"]
        assert trained == [*range(1, self.steps + 1)], "each step once"
        assert lines == self.lines(whole)

    def processes(self) -> list[int]:
        """Returns the ids of processes that still run in the project's folder."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if path.readlink() == self.folder.resolve():
                    pids.append(int(path.parent.name))
        return pids

    def marks(self, run: str, kind: str) -> set[Any]:
        """Returns signs of a run's progress: checkpoint files, or the size of the metrics file."""
        folder = self.folder / "runs" / run
        if kind == "file":
            walk = os.walk(folder / "ckpt")  # Unlike pathlib, os.walk tolerates removed folders.
            return {name for _, folders, files in walk for name in (*folders, *files)}
        return {path.stat().st_size for path in folder.glob("metrics.jsonl")}


@dataclasses.dataclass(frozen=True)
class Moment:
    """The moment of a kill: ``delay`` seconds after an event has happened ``count`` times.

    Attributes:
        after: the event, which is "start", "step" or "file" (a new file of a checkpoint)
    """

    after: str
    delay: float
    count: int = 1

    def wait(self, project: Project, run: str, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the moment. Returns False if the process ends first."""
        limit, known, seen = time.time() + 900, project.marks(run, self.after), 0
        while self.after != "start" and seen < self.count:
            assert time.time() < limit, f"{run} does not get on"
            if process.poll() is not None:
                return False
            time.sleep(0.002)
            now = project.marks(run, self.after)
            seen, known = seen + len(now - known), now
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.delay)
        return process.poll() is None


def draw_moments(seed: int, startup: float) -> Iterator[Moment]:
    """Yields random moments in all phases of a run, mostly in start-up, where kills cost least.

    Args:
        seed: the seed of the random numbers
        startup: the duration of the start-up in seconds
    """
    draw = random.Random(seed)
    while True:
        moments = [
            # The delay is short, so that two kills follow each other immediately.
            Moment("start", draw.uniform(0, 0.1 * startup)),
            Moment("start", draw.uniform(0, startup)),
            Moment("step", draw.uniform(0, 2)),
            Moment("file", draw.uniform(0, 0.01), draw.randint(1, 14)),
        ]
        yield draw.choices(moments, [25, 30, 20, 25])[0]


def train_and_kill(project: Project, plan: Iterator[Moment], kills: int) -> list[str]:
    """Trains runs that are killed ``kills`` times in total, and returns the names of the runs.

    Each run is trained to its last step.
    """
    runs, done = list[str](), 0
    while done < kills:
        runs.append(run := f"killed-{len(runs) + 1}")
        process = project.start(run, PAUSE)
        while done < kills and next(plan).wait(project, run, process):
            process.kill()
            process.wait()
            process, done = project.start(run, PAUSE), done + 1
        log = project.folder / f"{run}.log"
        assert process.wait(timeout=600) == 0, log.read_text(errors="replace")[-3000:]
    return runs


def find_workers(supervisor: int) -> list[int]:
    """Returns the process ids of a supervisor's workers."""
    workers = []
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
        for pid in children.split():
            with contextlib.suppress(OSError):
                if b"TF_CONFIG=" in Path(f"/proc/{pid}/environ").read_bytes():
                    workers.append(int(pid))
    return workers


def test_run_of_one_process_survives_any_kill(tmp_path: Path) -> None:
    project = Project(tmp_path, steps=300).make()
    startup = project.train_whole("whole")
    for run in train_and_kill(project, draw_moments(3, startup), kills=6):
        project.compare(run, "whole")


@pytest.mark.skipif(shutil.which("cc") is None, reason="compiles scripts/kill_at.c")
def test_runs_survive_kills_before_a_file_operation(tmp_path: Path) -> None:
    """Runs on two replicas survive kills before a file operation.

    ``make soak`` uses the same script with many more kills.
    """
    words = [str(tmp_path), "--kills=4", "--seed=0"]
    command = [sys.executable, "-m", "scripts.soak_operations", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1].startswith("4 kills in ")


def until_none_is_left(project: Project) -> None:
    wait_until(
        lambda: not project.processes(),
        seconds=60,
        interval=0.05,
        explain=lambda: f"still running: {project.processes()}",
    )


@pytest.mark.cluster
def test_run_of_a_cluster_survives_any_kill(tmp_path: Path) -> None:
    """A run of a cluster survives kills of its supervisor and of its workers."""
    project = Project(tmp_path, steps=60, workers=2).make()
    project.train_whole("whole")
    assert project.processes() == []
    for moment, number, code in (
        (Moment("step", 0.3), signal.SIGTERM, 143),
        (Moment("start", 1.5), signal.SIGKILL, -signal.SIGKILL),
    ):
        process = project.start("killed-1", PAUSE)
        assert moment.wait(project, "killed-1", process)
        process.send_signal(number)
        assert process.wait() == code
        until_none_is_left(project)
    process = project.start("killed-1", PAUSE)
    for worker, moment in enumerate([Moment("step", 0.2), Moment("file", 0.005, 5)]):
        assert moment.wait(project, "killed-1", process)
        os.kill(find_workers(process.pid)[worker], signal.SIGKILL)
    assert process.wait(timeout=600) == 0
    until_none_is_left(project)
    project.compare("killed-1", "whole")


# ---- A host that is disconnected ----------------------------------------------------------------

HOSTS = {f"ctl{os.getpid()}a": "10.213.77.1", f"ctl{os.getpid()}b": "10.213.77.2"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Yields the names of two simulated hosts that are connected by a virtual cable."""
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
    """Starts one process on each host. The processes share the run folder."""
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
def test_run_survives_the_loss_of_a_host(hosts: list[str], tmp_path: Path) -> None:
    """After the loss of a host, all processes exit with code 75 (lost peer). The run can resume."""
    project = Project(tmp_path, steps=30).make()
    both = start(project)
    # Disconnects the host while a checkpoint other than the first one is being saved.
    assert Moment("file", 0, 12).wait(project, "lost", both[0])
    ip("-n", hosts[1], "link", "set", "cable", "down")
    try:
        assert [process.wait(timeout=300) for process in both] == [75, 75]
    finally:
        ip("-n", hosts[1], "link", "set", "cable", "up")
        for process in both:
            process.kill()
    last_words = (tmp_path / "lost-1.log").read_text().splitlines()[-1]
    assert last_words.startswith("error: no answer from process 0 at 10.213.77.1:2222; restart all")
    assert [process.wait(timeout=600) for process in start(project)] == [0, 0]
