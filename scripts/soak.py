"""Kills the training of ``make prove`` many times at random moments, and compares its weights.

``python -m scripts.soak FOLDER --kills 20 --of clusters`` adds a line for each run to
FOLDER/log.jsonl. Without ``--kills``, it prints a summary of these lines. A process is killed while
it starts, between two steps, or while it writes a checkpoint. In a cluster, one process is killed,
or all of them. The script soak_operations.py, in contrast, kills a run before each of its file
operations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core import __version__
from scripts.proof.callbacks import STEPS
from scripts.prove import (
    ENGINE,
    LIMIT,
    PATIENCE,
    PAUSE,
    Run,
    find_code,
    is_running,
    measure,
    start_processes,
    wait_for,
)

Way = tuple[int, int]  # the devices of each process, and the number of processes
KINDS: dict[str, list[list[Way]]] = {  # the possible starts of a run, by kind
    "one": [[(1, 1)], [(1, 1)], [(1, 1), (2, 1), (3, 1), (4, 1)]],
    "clusters": [[(1, 2)], [(1, 3)], [(1, 2), (1, 3)]],
    "both": [[(1, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2)]],
}
KILLS = 8  # the maximum number of kills of a run
# Seconds in which the other processes of a cluster must end. A process that is joining needs 60.
SILENCE = 75
WAITS = "cluster: waiting; no answer from"


def train(
    folder: Path, ways: Sequence[Way], kills: int, draw: random.Random, is_logical: bool
) -> dict[str, Any]:
    """Trains one run to its end, and kills it several times; returns its counts for the log.

    Raises:
        AssertionError: the run ended with a wrong exit code, or did not end.
    """
    run = Run(ENGINE, "soak", ways, is_noisy=is_logical)
    counts = {"start": 0, "step": 0, "save": 0, "unfinished": 0}
    slowest = 0.0
    startup = 5.0
    for number in itertools.count():
        start = folder / str(number)
        begun = time.monotonic()
        started = start_processes(run, draw.choice(ways), start, PAUSE)
        moment = draw.choice(("start", "step", "save"))
        if kills == 0:
            moment = ""
        elif moment == "start":
            time.sleep(draw.uniform(0, startup))
        else:
            wait_for(start.with_suffix(".ids"), started)
            startup = time.monotonic() - begun
            wait_in_training(folder, moment, started, draw)
        killed: list[subprocess.Popen[bytes]] = []
        if moment and is_running(started):
            killed = kill(started, draw)
            kills -= 1
            counts[moment] += 1
        killed_at = time.monotonic()
        others = [process for process in started if process not in killed]
        if killed and not end_others(folder, number, others, moment):
            killed = started
        if killed and others and killed != started:
            slowest = max(slowest, time.monotonic() - killed_at)
        codes = {find_code(process) for process in others if killed != started}
        assert codes <= {0, 75 * bool(killed)}, f"{folder}: {number} ended with {codes}"
        counts["unfinished"] += bool(killed) and is_unfinished(folder / "run/ckpt")
        if not killed:
            return {**counts, "slowest": round(slowest, 1)}
    raise AssertionError


def wait_in_training(
    folder: Path, moment: str, started: Sequence[subprocess.Popen[bytes]], draw: random.Random
) -> None:
    """Waits for a random moment in a ``step`` or in a ``save``, while the processes train."""
    if moment == "step":
        time.sleep(draw.uniform(0, 3))
        return
    wait_for_files(folder, draw.randint(1, 20), started)
    time.sleep(draw.uniform(0, 0.01))


def kill(
    started: list[subprocess.Popen[bytes]], draw: random.Random
) -> list[subprocess.Popen[bytes]]:
    """Kills all processes, or one of them; returns the killed ones."""
    killed = started
    if draw.random() >= 0.5:
        killed = [draw.choice(started)]
    for process in killed:
        process.kill()
    return killed


def end_others(
    folder: Path, number: int, others: Sequence[subprocess.Popen[bytes]], moment: str
) -> bool:
    """Waits until the processes that were not killed have ended.

    Returns:
        False if they had to be killed, too, because they reported that they wait for a process
        that had not joined the cluster yet.

    Raises:
        AssertionError: they do not end.
    """
    ended_alone = True
    until = time.monotonic() + SILENCE
    while any(process.poll() is None for process in others):
        logs = [path.read_text() for path in folder.glob(f"{number}.log*")]
        if moment == "start" and any(WAITS in text for text in logs):
            for process in others:
                process.kill()
            ended_alone = False
        assert time.monotonic() < until, f"{folder}: {number} waits for ever"
        time.sleep(0.1)
    return ended_alone


def wait_for_files(folder: Path, count: int, started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits until a number of new checkpoint files exist."""
    known = list_files(folder)
    until = time.monotonic() + PATIENCE
    while count > 0 and is_running(started) and time.monotonic() < until:
        now = list_files(folder)
        count -= len(now - known)
        known = now
        time.sleep(0.001)


def list_files(folder: Path) -> set[str]:
    walk = os.walk(folder / "run/ckpt")
    return {name for _, folders, files in walk for name in (*folders, *files)}


def is_unfinished(ckpt: Path) -> bool:
    """Returns True if there are files of a checkpoint without a record."""
    records = {path.stem for path in ckpt.glob("engine/*.json")}
    return any(path.name.split(".")[0] not in records for path in ckpt.glob("**/ckpt-*"))


def read_weights(folder: Path) -> list[np.ndarray]:
    """Returns the weights in the last checkpoint of a run."""
    reader = tf.train.load_checkpoint(str(folder / f"run/ckpt/ckpt-{STEPS}"))
    names = [name for name in reader.get_variable_to_shape_map() if "_trainable_variables" in name]
    return [reader.get_tensor(name) for name in sorted(names)]


def soak(folder: Path, of: str, kills: int, seed: int, is_logical: bool) -> bool:
    """Trains runs until the number of kills is reached; returns True if no weights differ."""
    draw = random.Random(seed)
    done = 0
    well = True
    for number in itertools.count():
        if done >= kills:
            return well
        ways = KINDS[of][number % len(KINDS[of])]
        devices, processes = ways[0]
        whole = folder / f"whole-{devices}-{processes}{'-logical' * is_logical}"
        if not whole.exists():
            whole.mkdir()
            train(whole, ways[:1], 0, draw, is_logical)
        place = folder / f"{of}-{seed}-{number}"
        place.mkdir()
        line = train(place, ways, min(KILLS, kills - done), draw, is_logical)
        done += line["start"] + line["step"] + line["save"]
        difference = measure(read_weights(place), read_weights(whole))
        is_rounded = len(ways) > 1 and not is_logical
        well &= difference <= (LIMIT if is_rounded else 0)
        line |= {"of": of, "ways": ways, "difference": difference, "engine": __version__}
        line["logical"] = is_logical
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(line, flush=True)
    raise AssertionError


def sum_up(folder: Path) -> None:
    """Prints the number of kills, and the largest differences."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for of, is_same, is_logical in itertools.product(KINDS, (True, False), (False, True)):
        lines_of_kind = [
            line
            for line in lines
            if (line["of"], len(line["ways"]) == 1, line["logical"]) == (of, is_same, is_logical)
        ]
        if not lines_of_kind:
            continue
        sums = {key: sum(line[key] for line in lines_of_kind) for key in ("start", "step", "save")}
        sums["unfinished"] = sum(line["unfinished"] for line in lines_of_kind)
        largest = {
            key: max(line[key] for line in lines_of_kind) for key in ("difference", "slowest")
        }
        print(
            of,
            "as many" if is_same else "other numbers",
            "logical replicas" * is_logical,
            f"{len(lines_of_kind)} runs",
            sums,
            largest,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--of", choices=KINDS, default="one")
    parser.add_argument(
        "--logical-replicas",
        action="store_true",
        help="train with logical replicas, Dropout and batch normalization; no bit may differ",
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    settings = parser.parse_args()
    settings.folder.mkdir(parents=True, exist_ok=True)
    if settings.kills:
        is_logical = settings.logical_replicas
        return int(
            not soak(settings.folder, settings.of, settings.kills, settings.seed, is_logical)
        )
    sum_up(settings.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
