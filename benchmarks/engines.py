"""Compares the speed of this engine with the ``ctl_core`` in FOLDER.

To run it: ``python -m benchmarks.engines FOLDER``. For the engine of another commit, first run
``git worktree add ../before COMMIT``; FOLDER is then ``../before``.

Two engines cannot be imported into one process. Therefore, each engine gets its own process for
each row of the table. The two train the same program, and are timed in turn, one segment of steps
at a time. A row says if their weights differ, as they do if one of the engines draws other random
numbers. A ratio is the time of this engine divided by the time of the other one. A row fails if the
lower quartile of its ratios is above 1.03, because this engine is then slower by more than noise.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = Path(__file__).resolve().parents[1]
WARM = 1
MOST = 1.03
EVALUATION = "noisy cnn, an evaluation on 2 devices"
# Name, number of devices, workload, number of steps between two reads of the loss, settings.
ROWS: list[tuple[str, int, str, int, dict[str, Any]]] = [
    *((f"{work}, loss every {every}", 1, work, every, {}) for work, every in
      [("mlp", 50), ("mlp", 10), ("mlp", 1), ("cnn", 50), ("embedding", 50),
       ("lstm", 50), ("transformer", 50), ("images", 50)]),
    *((f"{work}, compiled", 1, work, 50, {"jit_compile": True}) for work in
      ("mlp", "embedding", "lstm", "transformer")),
    *((f"{work}, {devices} devices", devices, work, 50, {}) for devices in (2, 4)
      for work in ("mlp", "cnn")),
    ("a lookup table, 2 devices", 2, "table", 50, {}),
    ("a summary, 2 devices", 2, "summary", 50, {}),
    ("cnn, a checkpoint every 100 steps", 1, "cnn", 50, {"ckpt_every": 100}),
    ("noisy cnn", 1, "noisy", 50, {}),
    *((f"noisy cnn, {devices} devices", devices, "noisy", 50, {}) for devices in (2, 4)),
    ("noisy cnn, 4 micro-batches", 1, "noisy", 50, {"accumulate_steps": 4}),
    ("noisy cnn, 4 logical replicas", 1, "noisy", 50, {"logical_replicas": 4}),
    ("noisy cnn, 4 logical replicas on 4 devices", 4, "noisy", 50, {"logical_replicas": 4}),
    (EVALUATION, 2, "noisy", 0, {}),
]  # fmt: skip


# Commands that run in a folder with a callbacks.py that contains CALLBACKS. The whole process is
# timed.
COMMANDS = {
    "a training of one step": ["train", "--steps", "1"],
    "--check": ["train", "--check"],
}
CALLBACKS = """
import keras
import tensorflow as tf

def create_dataset(per_replica_batch_size):
    inputs, labels = tf.random.uniform((256, 16), seed=1), tf.range(256) % 10
    dataset = tf.data.Dataset.from_tensor_slices((inputs, labels))
    return dataset.batch(per_replica_batch_size, drop_remainder=True)

def create_model():
    layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)]
    return keras.Sequential(layers)

def create_loss():
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda pair: losses(pair[1], pair[0])
"""


# The rows in which the engines train other weights.
other_weights: set[str] = set()


class Engine:
    """A process in which one engine trains the workload of a row, and waits between segments."""

    def __init__(self, folder: Path, row: int) -> None:
        words = [sys.executable, "-m", "benchmarks.engines", "--row", str(row), str(folder)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(words, cwd=ROOT, **pipes)
        self.weights: list[float] = self._read()

    def advance(self) -> float:
        """Trains a segment; returns the seconds per step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("engine "):
                return json.loads(line.removeprefix("engine "))
        raise SystemExit("error: an engine has ended early, see above.")


def serve(folder: Path, row: int) -> None:
    """Runs in the process of an ``Engine``.

    Trains up to step 50, then one segment for each line that it reads from its standard input.
    """
    sys.path.insert(0, str(folder))
    import numpy as np

    import ctl_core
    from benchmarks.pace import Pace, settle
    from benchmarks.peers import EVALUATED, engine, evaluate
    from benchmarks.workloads import WORKLOADS

    assert Path(ctl_core.__file__).resolve().is_relative_to(folder.resolve()), ctl_core.__file__
    title, devices, name, every, others = ROWS[row]
    replicas: Any = SimpleNamespace(num_replicas_in_sync=devices)
    work = WORKLOADS[name]().on(devices)
    segment = work.segment_of(bool(others.get("jit_compile")))
    others = {"train": ctl_core.train, **others}
    pace = Pace(lambda pace: engine(work, replicas, every, pace, **others), segment)
    if title == EVALUATION:
        segment = EVALUATED
        pace = Pace(lambda pace: evaluate(work, pace, virtual_devices=devices), segment)
    pace.advance()
    weights = pace.weights() if pace.weights else []
    print("engine", json.dumps([float(np.abs(weight).sum()) for weight in weights]), flush=True)
    for _ in sys.stdin:
        settle()
        print("engine", json.dumps(pace.advance() / segment), flush=True)


def compare(this: Path, other: Path, row: int, rounds: int) -> list[float]:
    """Returns for each round the time of a row with this engine, divided by the other's.

    Of two equal engines, the one that started first was up to 6 % slower. Therefore, each engine
    starts first in half of the rounds.
    """
    first = rounds // 2
    inverse = _compare(other, this, row, first)
    return _compare(this, other, row, rounds - first) + [1 / ratio for ratio in inverse]


def _compare(first: Path, second: Path, row: int, rounds: int) -> list[float]:
    """Returns for each round the time of the engine that starts first, divided by the other's."""
    engines = [Engine(folder, row) for folder in (first, second)]
    try:
        pairs = zip(engines[0].weights, engines[1].weights, strict=True)
        if not all(abs(loss - expected) <= 1e-4 * abs(expected) for loss, expected in pairs):
            other_weights.add(ROWS[row][0])
        ratios = []
        for number in range(WARM + rounds):
            order = engines if number % 2 else engines[::-1]
            seconds = {engine: engine.advance() for engine in order}
            ratios.append(seconds[engines[0]] / seconds[engines[1]])
        return ratios[WARM:]
    finally:
        for engine in engines:
            engine.end()


def compare_commands(this: Path, other: Path, words: list[str], rounds: int) -> list[float]:
    """Returns for each round the time of a command with this engine, divided by the other's."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "callbacks.py").write_text(CALLBACKS, encoding="utf-8")
        for number in range(WARM + rounds):
            seconds = {}
            for engine in (this, other) if number % 2 else (other, this):
                begun = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-m", "ctl_core", *words],
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": str(engine)},
                    stdout=subprocess.DEVNULL,
                    check=True,
                )
                seconds[engine] = time.perf_counter() - begun
            ratios.append(seconds[this] / seconds[other])
    return ratios[WARM:]


def main(argv: list[str] | None = None) -> int:
    """Compares the engines, and prints a row for each measurement; returns 1 if a row fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("folder", type=Path, help="contains the other engine's ctl_core")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", help="only rows whose name begins with this")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.row is not None:
        serve(arguments.folder, arguments.row)
        return 0
    failed = False
    print(f"{'':36}median  quartiles")
    other = arguments.folder.resolve()
    measures = {
        name: functools.partial(compare, ROOT, other, row) for row, (name, *_) in enumerate(ROWS)
    }
    for name, words in COMMANDS.items():
        measures[name] = functools.partial(compare_commands, ROOT, other, words)
    for name, measure in measures.items():
        if name.startswith(arguments.only or ""):
            ratios = measure(arguments.rounds)
            low, median, high = statistics.quantiles(ratios, n=4)
            failed |= low > MOST
            text = f"{name:36}{median:6.2f}  {low:.2f} to {high:.2f}{'  slower' * (low > MOST)}"
            if name in other_weights:
                text += "  other weights"
            print(text, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
