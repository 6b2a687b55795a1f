"""Trains one program in many ways with ctl_core, Keras ``fit`` and a custom loop (make prove).

Each trainer trains it on several devices and processes, and is killed and restarted. The table that
is printed compares the final weights. The programs are in scripts/proof.

Each run is compared with the uninterrupted run of the same trainer on one device, and this run with
the one of ctl_core. The difference is the largest difference in any variable, relative to the
largest value of that variable. A model with Dropout and batch normalization is only compared with
runs of the same trainer.

The table also counts the examples that were used twice or never. Only steps that the final weights
contain are counted: if a step was taken again after a restart, only its last execution counts.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from ctl_core.cluster.supervisor import find_free_ports
from scripts.proof import callbacks as program

ROOT = Path(__file__).parents[1]
MARKS = "<!-- make prove -->\n", "<!-- /make prove -->"
LIMIT = 1e-5  # the largest difference accepted for the engine; on one device, 0
PAUSE = 0.06  # seconds that a step waits in a run that is killed
PATIENCE = 240  # seconds to wait for a first step, and for the end of a process
WHO = ENGINE, FIT, LOOP = "ctl_core", "Keras `fit`", "textbook loop"
ONE = "one device"
KILLED = "killed, on one device"
NOISY = "Dropout and batch normalization"
LOGICAL_REPLICAS = 4  # used by the engine if the model is noisy
SETTINGS: dict[str, Any] = {
    "steps": program.STEPS,
    "batch_size": program.BATCH,
    "learning_rate": program.RATE,
    "seed": program.SEED,
    "run_name": "run",
}


class Run(NamedTuple):
    """A run that is trained in new processes, in one or several attempts.

    Attributes:
        who: the trainer
        what: a description for the table
        ways: the numbers of devices and processes of each attempt; all attempts except the last are
            killed
        how: the arguments of scripts.proof.peers, if the trainer is a peer
        is_noisy: whether the model has Dropout and batch normalization; the engine then uses
            logical replicas
    """

    who: str
    what: str
    ways: Sequence[tuple[int, int]]
    how: Sequence[str] = ()
    is_noisy: bool = False

    def command(self, devices: int) -> list[str]:
        """Returns the command of an attempt, which runs in the folder of the run."""
        if self.who == ENGINE:
            words = ["ctl_core", "train", f"--callbacks={program.__file__}", "--runs-dir=."]
            words += [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
            words += [f"--virtual-devices={devices}", f"--ckpt-every={program.SAVE_EVERY}"]
            words += ["--deterministic"]
            if self.is_noisy:
                words += [f"--logical-replicas={LOGICAL_REPLICAS}"]
        else:
            name = "fit" if self.who == FIT else "loop"
            words = ["scripts.proof.peers", name, str(devices), *self.how]
        return [sys.executable, "-m", *words]


class Trained(NamedTuple):
    """The result of a run.

    Attributes:
        who: the trainer
        what: a description for the table
        message: the error message if the run failed, otherwise empty
        weights: the final weights
        twice: how often an example was used again in the same epoch
        never: how often an example was not used in an epoch
        clipped: the number of gradients that were clipped
        kills: the number of kills
    """

    who: str
    what: str
    message: str = ""
    weights: Sequence[np.ndarray] = ()
    twice: int = 0
    never: int = 0
    clipped: int = 0
    kills: int = 0


def list_runs() -> Iterator[Run]:
    """Yields the runs that are trained in new processes."""
    choice = random.Random(program.SEED)
    ways = [(1, 1)]
    for _ in range(10):
        others = {(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3)} - {ways[-1]}
        ways.append(choice.choice(sorted(others)))
    four = [(1, 1)] * 4
    various = [(1, 1), (2, 1), (4, 1), (1, 1)]
    other = "killed, each time on other devices"
    for number in (2, 3):
        yield Run(ENGINE, f"{number} processes", [(1, number)])
    yield Run(ENGINE, KILLED, four)
    yield Run(ENGINE, other, ways)
    for who, save in ((FIT, "epoch"), (LOOP, "nothing")):
        yield Run(who, ONE, [(1, 1)], [save])
        yield from (Run(who, f"{number} devices", [(number, 1)], [save]) for number in (2, 3, 4))
        yield from (Run(who, f"{number} processes", [(1, number)], [save]) for number in (2, 3))
    yield Run(FIT, "micro-batches", [(1, 1)], ["epoch", "2"])
    yield Run(FIT, KILLED, four, ["steps"])
    yield Run(FIT, f"{KILLED}, saved each epoch", four, ["epoch"])
    yield Run(FIT, other, various, ["epoch"])
    yield Run(LOOP, KILLED, four, ["iterator"])
    yield Run(LOOP, other, various, ["iterator"])
    yield Run(LOOP, f"{other}, without the iterator", various, ["weights"])
    for who, save in ((ENGINE, ""), (FIT, "epoch"), (LOOP, "nothing")):
        yield Run(who, f"{NOISY}, {ONE}", [(1, 1)], [save], is_noisy=True)
        for number in (2, 3, 4):
            yield Run(who, f"{NOISY}, {number} devices", [(number, 1)], [save], is_noisy=True)
        for number in (2, 3):
            yield Run(who, f"{NOISY}, {number} processes", [(1, number)], [save], is_noisy=True)
    ways = [(1, 1), (3, 1), (1, 2), (4, 1), (1, 3), (2, 2), (1, 1)]
    yield Run(ENGINE, f"{NOISY}, {other}", ways, is_noisy=True)


def train_all(folder: Path) -> Iterator[Trained]:
    """Yields all results: runs of the engine in this process, then runs in new processes."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )
    ways = {ONE: (1, 1)} | {f"{number} devices": (number, 1) for number in (2, 3, 4)}
    for what, (devices, micro_batches) in {**ways, "micro-batches": (1, 3)}.items():
        place = tempfile.mkdtemp(dir=folder)
        os.environ["PROOF"] = f"{place}/0"
        settings = {"virtual_devices": devices, "accumulate_steps": micro_batches, **SETTINGS}
        settings |= {"deterministic": True, "ckpt_every": 0, "runs_dir": place}
        ctl_core.train(program, ctl_core.Config(**settings))
        yield read(Path(place), ENGINE, what)
    with ThreadPoolExecutor(3) as pool:
        yield from pool.map(lambda run: train(Path(tempfile.mkdtemp(dir=folder)), run), list_runs())


def train(folder: Path, run: Run) -> Trained:
    """Trains a run in new processes, which are killed at random times after the first step."""
    moments = random.Random(program.SEED)
    hits = 0
    kills = len(run.ways) - 1
    for number, way in enumerate(run.ways):
        start = folder / str(number)
        is_killed = number < kills
        started = start_processes(run, way, start, PAUSE * bool(kills))
        if is_killed:
            wait_for(start.with_suffix(".ids"), started)
            time.sleep(moments.uniform(0, 1.5 * program.STEPS * PAUSE / kills))
            hits += is_running(started)
            for process in started:
                process.kill()
        if {find_code(process) for process in started} - {0, -signal.SIGKILL * is_killed}:
            return Trained(run.who, run.what, find_message(start))
        if start.with_suffix(".npz").exists():
            break
    return read(folder, run.who, run.what)._replace(kills=hits)


def start_processes(
    run: Run, way: tuple[int, int], start: Path, pause: float
) -> list[subprocess.Popen[bytes]]:
    """Starts an attempt: one process, or a cluster on this machine."""
    devices, processes = way
    environ = {**os.environ, "PROOF": str(start), "PAUSE": str(pause)}
    environ |= {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    if run.is_noisy:
        environ["NOISY"] = "1"
    hosts = [f"127.0.0.1:{port}" for port in find_free_ports(processes)]
    started = []
    for index in range(processes):
        if processes > 1:
            place = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
            environ["TF_CONFIG"] = json.dumps(place)
        with start.with_suffix(f".log{index}").open("wb") as log:
            how: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": start.parent}
            started.append(subprocess.Popen(run.command(devices), env=environ, **how))
    return started


def wait_for(file: Path, started: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + PATIENCE
    while not file.exists() and is_running(started) and time.monotonic() < until:
        time.sleep(0.01)


def is_running(started: Sequence[subprocess.Popen[bytes]]) -> bool:
    return all([process.poll() is None for process in started])


def find_code(process: subprocess.Popen[bytes]) -> int:
    """Returns the exit code of a process; terminates it if it does not end in time."""
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.terminate()
        return process.wait()


def find_message(start: Path) -> str:
    """Returns the last error message in the logs of an attempt, shortened."""
    text = "\n".join(path.read_text() for path in sorted(start.parent.glob(f"{start.name}.log*")))
    lines = re.findall(r"^(?:[\w.]+\.)?(\w*[Ee]rror: .*)", text, re.M)
    message = lines[-1] if lines else f"no end within {PATIENCE} s"
    message = re.sub(r"\{\{.*?\}\} |\[Op.*|\|", "", message)
    return textwrap.shorten(message, 75, placeholder=" ...")


def read(folder: Path, who: str, what: str) -> Trained:
    """Reads the result of a run from its files: the weights, and the examples of each attempt."""
    steps: dict[int, list[list[Any]]] = {}
    attempts = sorted(folder.glob("*.ids"), key=lambda path: int(path.stem))
    for path in attempts:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps |= {step: [line for line in lines if line[0] == step] for step, *_ in lines}
    # With several processes or micro-batches, a step has several lines.
    taken = [*itertools.chain(*steps.values())]
    used = collections.Counter((epoch, each) for _, epoch, ids, _ in taken for each in ids)
    clipped = sum(norm > program.CLIP for *_, norm in taken)
    never = program.EPOCHS * program.EXAMPLES - len(used)
    with np.load(attempts[-1].with_suffix(".npz")) as file:
        weights = [file[name] for name in file.files]
    return Trained(who, what, "", weights, used.total() - len(used), never, clipped)


def measure(weights: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> float:
    pairs = zip(weights, expected, strict=True)
    return max(float(np.abs(values - other).max() / np.abs(other).max()) for values, other in pairs)


def format_cell(trained: Trained, difference: float) -> str:
    """Returns a cell: the kills, the difference, and the examples used twice and never."""
    kills = f"{trained.kills}×: " if trained.kills else ""
    used = f", {trained.twice}/{trained.never}" if trained.twice or trained.never else ""
    return f"{kills}{f'{difference:.0e}' if difference else '0'}{used}"


def main() -> int:
    """Trains all runs, prints the table, and writes it into a page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.prove", description=__doc__)
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="a page for the table")
    into = parser.parse_args().into
    begun = time.monotonic()
    broken = False
    tf.get_logger().setLevel("ERROR")  # it warns about retracing, because there are many runs
    undisturbed: dict[tuple[str, bool], Trained] = {}  # by trainer and is_noisy
    cells: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for trained in train_all(Path(folder)):
            is_noisy = trained.what.startswith(NOISY)
            first = undisturbed.setdefault((trained.who, is_noisy), trained)
            expected = first
            if trained is first and not is_noisy:
                expected = undisturbed[ENGINE, False]
            difference = np.inf if trained.message else measure(trained.weights, expected.weights)
            limit = 0 if is_noisy or trained.what in (ONE, KILLED) else LIMIT
            broken |= trained.who == ENGINE and bool(
                difference > limit or trained.twice or trained.never
            )
            cell = (
                f"*fails*: {trained.message}"
                if trained.message
                else format_cell(trained, difference)
            )
            cells.setdefault(trained.what, {})[trained.who] = cell
            print(f"{trained.who}, {trained.what}: {cell}", flush=True)
    lines = [["what was done", *WHO], ["---"] * 4]
    lines += [[what, *(of.get(who, "") for who in WHO)] for what, of in cells.items()]
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(trained.ru_utime + trained.ru_stime for trained in usage)
    clipped = undisturbed[ENGINE, False].clipped
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines) + (
        f"\nTensorFlow {tf.__version__}, Keras {keras.__version__}. All runs together took "
        f"{time.monotonic() - begun:.0f} s, and used {seconds:.0f} s of processor time. In the "
        f"first run of `{ENGINE}`, the gradient was clipped in {clipped} of {program.STEPS} "
        "steps.\n"
    )
    print(text)
    if into:
        before, _, rest = into.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        into.write_text(f"{before}{MARKS[0]}{text}{MARKS[1]}{after}", encoding="utf-8")
    if broken:
        print(f"error: a run of {ENGINE} differs, see the table.", file=sys.stderr)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
