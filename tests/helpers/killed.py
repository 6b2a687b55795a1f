"""A small project that is killed again and again, and compared with one that never was.

Shuffled by a buffer, with random augmentation, Dropout, batch normalisation, and a hook at each
step. SIGKILL comes at random moments: during imports, tracing, steps, evaluations, and while a
checkpoint is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import small
from tests.golden.compare import read_checkpoint
from tests.helpers import lean

CALLBACKS = (
    small.CALLBACKS
    + """
import json
import os
import time

from ctl_core import data, report

PLACE = json.loads(os.environ.get("TF_CONFIG") or '{"task": {"index": 0}}')
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
PAUSE = "--hparams.pause=0.02"  # so that kills do not all come too late


@dataclasses.dataclass(frozen=True)
class Project:
    """The project's folder, and how it is trained."""

    folder: Path
    steps: int = 300
    workers: int = 1

    def make(self) -> Project:
        """Writes the hooks."""
        (self.folder / "callbacks.py").write_text(CALLBACKS)
        return self

    def start(
        self, run: str, *flags: str, before: Sequence[str] = (), **how: Any
    ) -> subprocess.Popen[bytes]:
        """Starts training, where the run ended if it is there already.

        Args:
            before: a command that runs the command, such as ``nice``
            how: see ``subprocess.Popen``
        """
        command = [*before, sys.executable, "-m", "ctl_core", "train", *SETTINGS.split()]
        command += [f"--steps={self.steps}", f"--run-name={run}", *flags]
        if self.workers > 1:
            command += [f"--workers={self.workers}", "--max-restarts=1000000"]
        environ = {**how.pop("env", os.environ), "PYTHONPATH": lean.PYTHONPATH}
        environ.pop("TF_CPP_MIN_LOG_LEVEL", None)  # the engine's own choice is to be seen
        with (self.folder / f"{run}.log").open("ab") as log:
            how = {"stdout": log, "stderr": log, **how}
            return subprocess.Popen(command, cwd=self.folder, env=environ, **how)

    def train_whole(self, run: str) -> float:
        """Trains undisturbed; returns how long the start took (seconds)."""
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
        """Reads the last checkpoint, all but the data pipeline's own serialized form."""
        return {
            f"{part}/{key}": np.asarray(value).tobytes()
            for part in ("", "engine")
            for key, value in read_checkpoint(self.folder / "runs" / run, self.steps, part).items()
            if "ITERATOR" not in key
        }

    def compare(self, run: str, whole: str) -> None:
        """Compares two runs bit for bit: all that is saved, and each line of the metrics."""
        expected, found = self.tensors(whole), self.tensors(run)
        assert {key for key in {*expected, *found} if expected.get(key) != found.get(key)} == set()
        lines = self.lines(run)
        trained = [line["step"] for line in lines if line["split"] == "train"]
        assert trained == [*range(1, self.steps + 1)], "each step once"
        assert lines == self.lines(whole)

    def processes(self) -> list[int]:
        """Returns what still runs in the project's folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if path.readlink() == self.folder.resolve():
                    found.append(int(path.parent.name))
        return found

    def marks(self, run: str, kind: str) -> set[Any]:
        """Returns what shows how far a run is: its files of checkpoints, or how much it said."""
        folder = self.folder / "runs" / run
        if kind == "file":
            return {path.name for path in folder.glob("ckpt/**/*")}
        return {path.stat().st_size for path in folder.glob("metrics.jsonl")}


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to kill: ``delay`` seconds after something has happened ``count`` times.

    Attributes:
        after: start, step, or file (a new one of a checkpoint)
    """

    after: str
    delay: float
    count: int = 1

    def wait(self, project: Project, run: str, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the moment; returns whether it came before the process ended."""
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
    """Draws moments over everything that a run does; most in start-up, where kills cost less.

    Args:
        startup: how long a start takes (seconds)
    """
    draw = random.Random(seed)
    while True:
        moments = [
            Moment("start", draw.uniform(0, 0.1 * startup)),  # after another kill: twice in a row
            Moment("start", draw.uniform(0, startup)),
            Moment("step", draw.uniform(0, 2)),
            Moment("file", draw.uniform(0, 0.01), draw.randint(1, 14)),
        ]
        yield draw.choices(moments, [25, 30, 20, 25])[0]


def train_and_kill(project: Project, plan: Iterator[Moment], kills: int, seed: int) -> list[str]:
    """Trains runs ``killed-1``, ``killed-2``, ... until so many kills are spent.

    Of a cluster, one of the workers is killed, and the supervisor starts all again.

    Returns:
        The names of the runs, each trained to its end.
    """
    draw, runs, done = random.Random(seed), list[str](), 0
    while done < kills:
        run = f"killed-{len(runs) + 1}"
        runs.append(run)
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            process = project.start(run, PAUSE)
            while process.poll() is None and done < kills:
                done += kill_once(project, run, process, next(plan), draw)
            code = process.wait(timeout=600)
        assert code == 0, (project.folder / f"{run}.log").read_text(errors="replace")[-3000:]
    return runs


def kill_once(
    project: Project,
    run: str,
    process: subprocess.Popen[bytes],
    moment: Moment,
    draw: random.Random,
) -> bool:
    """Waits for the moment and kills; returns whether the run had not ended before."""
    victims = [process.pid]
    while project.workers > 1 and len(victims := find_workers(process.pid)) < project.workers:
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    if not moment.wait(project, run, process):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice(victims), signal.SIGKILL)
    # Those that share its fate are gone before the next ones start.
    while process.poll() is None and {*victims} & {process.pid, *find_workers(process.pid)}:
        time.sleep(0.01)
    return True


def find_workers(supervisor: int) -> list[int]:
    """Returns the processes of the workers that run under a supervisor."""
    found = []
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
        for pid in children.split():
            with contextlib.suppress(OSError):
                if b"TF_CONFIG=" in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(int(pid))
    return found
