"""Kills a run again and again, and compares it with one that was never interrupted.

    python scripts/kill_test.py [--kills 100] [--workers 1|2] [--seed 0]

A small project (shuffling by a buffer, random augmentation, Dropout, BatchNorm, a hook at each
step) is trained once undisturbed. Then it is trained again, while it is killed with SIGKILL at
random moments: during imports, tracing, steps, evaluations, and while a checkpoint is written.
With 2 workers, one of them is killed and the supervisor starts both again; now and then it is the
supervisor itself. A run that gets to its end before all kills are spent is compared and followed
by another. Exit code 0: with ``--deterministic``, all of them are the same bit for bit.

The moments come from ``--seed``; what they hit depends on the machine. A kill costs a start, some
8 seconds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Each process says in a file of its own what it is doing.
CALLBACKS = """
import json
import os
import time

import keras
import numpy as np
import tensorflow as tf

from ctl_core import data, report

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(203, 6, 6, 1)).astype("float32")
LABELS = RANDOM.integers(0, 3, 203)

PLACE = json.loads(os.environ.get("TF_CONFIG") or '{"task": {"index": 0}}')
PHASE = os.open(f"phase-{PLACE['task']['index']}", os.O_WRONLY | os.O_CREAT, 0o666)


def mark(phase):
    os.pwrite(PHASE, f"{phase:40}".encode(), 0)


mark("building")


def create_dataset(per_replica_batch_size, config):
    examples = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).shuffle(50, seed=config.seed)

    def augment(example, seed):
        image, label = example
        noise = tf.random.stateless_normal(image.shape, seed)
        return image + 0.1 * noise, label

    augmented = data.with_seeds(examples, config.seed).map(augment, num_parallel_calls=2)
    return augmented.batch(per_replica_batch_size)


def create_eval_dataset(per_replica_batch_size, hparams):
    def slow(image, label):
        def wait(label):
            mark("evaluating")
            time.sleep(hparams.get("pause", 0.0))
            return label

        return image, tf.ensure_shape(tf.py_function(wait, [label], label.dtype), label.shape)

    return tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(
        per_replica_batch_size).map(slow)


def create_model():
    return keras.Sequential([
        keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(3)])


def create_loss():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda loss_input: loss(loss_input[1], loss_input[0])


def input_pre(batch):
    mark("tracing")
    return batch[0]


def halve(lr):
    lr.assign(lr * 0.5)


def slow(step, loss, hparams):
    mark(f"after step {step}")
    report(step, loss=loss)
    time.sleep(hparams.get("pause", 0.0))


every_steps = {1: slow}
at_step = {30: halve, 60: halve}
"""


class Failed(Exception):
    """A run ended by itself with an error, got stuck, or is not the same."""


@dataclasses.dataclass(frozen=True)
class Project:
    """The project's folder, and how it is trained."""

    folder: Path
    steps: int = 300
    workers: int = 1

    def make(self) -> Project:
        """Writes the hooks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "callbacks.py").write_text(CALLBACKS)
        return self

    def start(
        self, run: str, *flags: str, before: Sequence[str] = (), **how: Any
    ) -> subprocess.Popen[bytes]:
        """Starts training, in the run's folder if it is there already.

        Args:
            run: its name
            flags: further settings
            before: a command that runs the command, such as ``nice``
            how: see ``subprocess.Popen``
        """
        for path in self.folder.glob("phase-*"):
            path.unlink()
        settings = "--batch-size=16 --ckpt-every=7 --eval-every=20 --deterministic"
        command = [*before, sys.executable, "-m", "ctl_core", "train", *settings.split()]
        command += [f"--steps={self.steps}", f"--run-name={run}", *flags]
        if self.workers > 1:
            command += [f"--workers={self.workers}", "--max-restarts=1000000"]
        with (self.folder / f"{run}.log").open("ab") as log:
            how = {"stdout": log, "stderr": log, "env": os.environ, **how}
            how["env"] = {**how["env"], "PYTHONPATH": str(ROOT)}
            how["env"].pop("TF_CPP_MIN_LOG_LEVEL", None)  # the engine's own choice is to be seen
            return subprocess.Popen(command, cwd=self.folder, **how)

    def expect_done(self, run: str, code: int) -> None:
        """Complains of another exit code than 0."""
        if code:
            text = (self.folder / f"{run}.log").read_text(errors="replace")
            raise Failed(f"{run} ended with exit code {code}:\n{text[-3000:]}")

    def lines(self, run: str) -> list[dict[str, Any]]:
        """Reads metrics.jsonl."""
        path = self.folder / "runs" / run / "metrics.jsonl"
        return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []

    def tensors(self, run: str) -> dict[str, bytes]:
        """Reads the last checkpoint, all but the data pipeline's own serialized form."""
        import numpy as np
        import tensorflow as tf

        found = {}
        for part in ("", "engine/"):
            path = self.folder / "runs" / run / "ckpt" / f"{part}ckpt-{self.steps}"
            reader = tf.train.load_checkpoint(str(path))
            for key in reader.get_variable_to_shape_map():
                if not any(word in key for word in ("OBJECT_GRAPH", "ITERATOR", "save_counter")):
                    found[part + key] = np.asarray(reader.get_tensor(key)).tobytes()
        return found

    def compare(self, run: str, whole: str) -> str:
        """Compares two runs: weights, optimizer, step, lr, seeds, and each line of the metrics.

        Returns:
            What was compared.

        Raises:
            Failed: they are not the same bit for bit; the message says where.
        """
        expected, found = self.tensors(whole), self.tensors(run)
        if differ := sorted(k for k in {*expected, *found} if expected.get(k) != found.get(k)):
            raise Failed(f"{run}: {len(differ)} tensors differ from {whole}: {differ[:5]}")
        lines, expected_lines = self.lines(run), self.lines(whole)
        trained = [line["step"] for line in lines if line["split"] == "train"]
        if trained != list(range(1, self.steps + 1)):
            raise Failed(f"{run}: metrics.jsonl has not each step once: {trained}")
        for line, other in zip(lines, expected_lines, strict=True):
            if line != other:
                raise Failed(f"{run}: metrics.jsonl has {line}, in {whole} {other}")
        return f"{len(found)} tensors and {len(lines)} lines of metrics"

    def processes(self) -> list[int]:
        """What still runs in the project's folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if path.readlink() == self.folder.resolve():
                    found.append(int(path.parent.name))
        return found

    def phase(self) -> str:
        """What the chief was doing last."""
        try:
            return (self.folder / "phase-0").read_text().strip() or "importing"
        except FileNotFoundError:
            return "importing"

    def files(self, run: str) -> set[str]:
        """The files of all checkpoints."""
        found: set[str] = set()
        for folder in ("ckpt", "ckpt/engine"):
            with contextlib.suppress(FileNotFoundError):
                found.update(os.listdir(self.folder / "runs" / run / folder))
        return found

    def half_saved(self, run: str, since: float) -> int | None:
        """The step of the checkpoint that was being written, if one was, after a kill."""
        folder = self.folder / "runs" / run / "ckpt"
        for path in [*folder.glob("ckpt-*"), *folder.glob("engine/*-*")]:
            step = path.name.replace(".", "-").split("-")[1].split("_")[0]
            with contextlib.suppress(FileNotFoundError):
                if (
                    step.isdigit()
                    and path.stat().st_mtime >= since
                    and not (folder / "engine" / f"ckpt-{step}.json").exists()
                ):
                    return int(step)
        return None


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to kill: ``delay`` seconds after something has happened ``count`` times.

    Attributes:
        after: start, step, file (a new one of a checkpoint) or evaluation
    """

    after: str
    delay: float
    count: int = 1

    def wait(self, project: Project, run: str, begun: float, ended: Callable[[], bool]) -> bool:
        """Waits for the moment; returns whether it came before the run ended."""
        limit = begun + 300
        known, seen = project.files(run), 0
        while not ended():
            if time.time() > limit:
                raise Failed(f"{run} does not get on: {project.phase()}")
            phase = project.phase()
            if self.after == "file":
                now = project.files(run)
                seen, known = seen + len(now - known), now
            elif (
                self.after == "start"
                or (self.after == "step" and phase.startswith("after step"))
                or (self.after == "evaluation" and phase == "evaluating" and project.files(run))
            ):
                seen = self.count
            if seen >= self.count:
                due = begun + self.delay if self.after == "start" else time.time() + self.delay
                while time.time() < due and not ended():
                    time.sleep(min(0.01, max(due - time.time(), 0)))
                return not ended()
            time.sleep(0.002)
        return False


def moments(
    seed: int, startup: float, shares: tuple[int, ...] = (15, 20, 20, 35, 10)
) -> Iterator[Moment]:
    """Draws moments over everything that a run does.

    Args:
        seed: of the random numbers
        startup: how long a start takes (seconds)
        shares: of the kinds of moments, as they are named below
    """
    draw = random.Random(seed)
    while True:
        kind = draw.choices(("at once", "start", "step", "file", "evaluation"), shares)[0]
        if kind == "at once":  # after another kill: twice in a row
            yield Moment("start", draw.uniform(0, 0.1 * startup))
        elif kind == "start":
            yield Moment("start", draw.uniform(0, startup))
        elif kind == "step":
            yield Moment("step", draw.uniform(0, 1))
        elif kind == "file":
            yield Moment("file", draw.uniform(0, 0.01), draw.randint(1, 14))
        else:
            yield Moment("evaluation", draw.uniform(0, 0.1))


def train_and_kill(
    project: Project,
    plan: Iterator[Moment],
    kills: int,
    seed: int,
    say: Callable[[str], None],
    supervisor: float = 0.15,
) -> list[str]:
    """Trains runs ``killed-1``, ``killed-2``, ... until ``kills`` kills are spent.

    Args:
        project: what to train
        plan: when to kill
        kills: how often, over all runs
        seed: for the choice among several processes
        say: gets a line for each kill
        supervisor: how often it is a cluster's supervisor that is killed, as a share

    Returns:
        The names of the runs, each trained to its end.
    """
    draw = random.Random(f"victims {seed}")
    hit: collections.Counter[str] = collections.Counter()
    done = 0
    runs: list[str] = []
    while done < kills:
        run = f"killed-{len(runs) + 1}"
        runs.append(run)
        code = None
        while code is None:
            process = project.start(run, "--hparams.pause=0.02")
            try:
                while process.poll() is None and done < kills:
                    struck = _strike(project, run, process, next(plan), draw, supervisor)
                    if struck:
                        done += 1
                        hit[struck.split(": ")[-1].split(" step")[0]] += 1
                        say(f"kill {done} of {kills}, {run}, {struck}")
                code = process.wait(timeout=None if done >= kills else 60)
            finally:
                process.kill()
            code = None if code == -signal.SIGKILL else code
        project.expect_done(run, code)
    say("hit: " + ", ".join(f"{what} {count} times" for what, count in hit.most_common()))
    return runs


def _strike(
    project: Project,
    run: str,
    process: subprocess.Popen[bytes],
    moment: Moment,
    draw: random.Random,
    share: float,
) -> str | None:
    """Waits for the moment and kills; returns what was hit, None if the run ended before."""
    begun, ended = time.time(), lambda: process.poll() is not None
    supervisor = project.workers > 1 and draw.random() < share
    victims = {process.pid: "the supervisor" if supervisor else "the process"}
    if project.workers > 1 and not supervisor:
        victims = _workers(process.pid)
        while len(victims) < project.workers and not ended():
            time.sleep(0.01)
            victims = _workers(process.pid)
        begun = time.time()
    if not moment.wait(project, run, begun, ended):
        return None
    pid = draw.choice(sorted(victims))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    seconds = time.time() - begun
    # Those that share its fate are gone before the next ones start.
    while _of(process, pid, victims) and not ended():
        time.sleep(0.01)
    phase = project.phase()
    if (step := project.half_saved(run, begun)) is not None:
        phase = f"saving step {step}"
    for path in project.folder.glob("phase-*"):
        path.unlink()
    return f"{victims[pid]} {seconds:.1f} s after its start: {phase}"


def _of(process: subprocess.Popen[bytes], pid: int, victims: dict[int, str]) -> bool:
    if pid == process.pid:
        return True
    return any(worker in victims for worker in _workers(process.pid))


def _workers(supervisor: int) -> dict[int, str]:
    """The workers that run under a supervisor, by process id."""
    found = {}
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        for pid in children:
            with contextlib.suppress(OSError, StopIteration, ValueError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                text = next(item for item in environ if item.startswith(b"TF_CONFIG="))
                place = json.loads(text.partition(b"=")[2])
                found[int(pid)] = f"worker {place['task']['index']}"
    return found


def train_whole(project: Project, run: str) -> float:
    """Trains undisturbed; returns how long the start took (seconds)."""
    begun, process = time.time(), project.start(run)
    Moment("step", 0).wait(project, run, begun, lambda: process.poll() is not None)
    startup = time.time() - begun
    project.expect_done(run, process.wait())
    return startup


def kill_test(project: Project, kills: int, seed: int, say: Callable[[str], None]) -> None:
    """Does what the module promises.

    Raises:
        Failed: a run is not the same as the one that was never interrupted, or failed.
    """
    begun = time.time()
    startup = train_whole(project.make(), "whole")
    say(f"the whole took {time.time() - begun:.0f} s, {startup:.1f} s of it to start")
    runs = train_and_kill(project, moments(seed, startup), kills, seed, say)
    for run in runs:
        say(f"{run} equals the whole: {project.compare(run, 'whole')}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--workers", type=int, default=1, choices=(1, 2), help="processes")
    parser.add_argument("--steps", type=int, default=300, help="of a run (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--folder", type=Path, help="keep the project here (default: nowhere)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as nowhere:
        folder = (options.folder or Path(nowhere)).resolve()
        project = Project(folder, options.steps, options.workers)
        begun = time.time()
        try:
            kill_test(
                project,
                options.kills,
                options.seed,
                lambda text: print(f"{time.time() - begun:6.0f} s  {text}", flush=True),
            )
        except Failed as error:
            print(f"NOT the same: {error}")
            return 1
    print(f"the same bit for bit after {options.kills} kills.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
