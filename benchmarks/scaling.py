"""What a step costs on several processes: all-reduce times measured, a model fitted, predicted.

``python -m benchmarks.scaling`` starts clusters of 2 and 3 processes on loopback, times all-reduces
of several sizes and steps of a model, and compares the steps with what the model of
docs/scaling.md says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

SIZES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)  # float32 numbers
ROUNDS = 7
WIDTHS = (64, 512, 1024)  # of the model's hidden layer
INPUTS, OUTPUTS, BATCH = 256, 16, 96


def _all_reduces(strategy: Any) -> dict[int, float]:
    """Times all-reduces inside one graph call; returns seconds by size."""
    import tensorflow as tf

    from benchmarks.peers import summing

    found = {}
    for size in SIZES:
        loop = summing(strategy, size)
        count = 50 if size <= 100_000 else 8
        loop(tf.constant(2))
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            loop(tf.constant(count))
            times.append((time.perf_counter() - start) / count)
        found[size] = statistics.median(times)
    return found


def _steps(folder: Path) -> dict[int, float]:
    """Times steps of a dense model; returns seconds by width."""
    import keras
    import numpy as np
    import tensorflow as tf

    import ctl_core

    class Hooks:
        def __init__(self, width: int) -> None:
            self.width = width
            self.every_steps: dict[int, Any] = {}

        def create_dataset(self, per_replica_batch_size: int) -> Any:
            random = np.random.default_rng(0)
            data = random.normal(size=(10 * BATCH, INPUTS)).astype("float32")
            labels = random.integers(0, OUTPUTS, 10 * BATCH)
            dataset = tf.data.Dataset.from_tensor_slices((data, labels))
            return dataset.batch(per_replica_batch_size, drop_remainder=True).cache()

        def create_model(self) -> Any:
            dense = keras.layers.Dense
            hidden = [dense(self.width, activation="relu") for _ in range(3)]
            return keras.Sequential([keras.Input((INPUTS,)), *hidden, dense(OUTPUTS)])

        def create_loss(self) -> Any:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
            return lambda pair: loss(pair[1], pair[0])

    found = {}
    for width in WIDTHS:
        config = ctl_core.Config(
            steps=4, batch_size=BATCH, runs_dir=str(folder), run_name=f"width-{width}"
        )
        state = ctl_core.train(Hooks(width), config)
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            state.functions.train_steps(20)
            times.append((time.perf_counter() - start) / 20)
        found[width] = statistics.median(times)
    return found


def parameters(width: int) -> int:
    """Counts the weights of the model that ``_steps`` trains."""
    return (INPUTS + 1) * width + 2 * (width + 1) * width + (width + 1) * OUTPUTS


def measure(out: Path) -> None:
    """What each process runs; the chief writes down what it measured."""
    from ctl_core.cluster.strategy import create_strategy
    from ctl_core.cluster.task import read_task
    from ctl_core.settings import Config

    config = Config(steps=1, batch_size=BATCH, run_name="scaling")
    task = read_task(config)
    reduces = _all_reduces(create_strategy(config)) if task.processes > 1 else {}
    steps = _steps(out)
    if task.chief:
        found = {"all_reduce": reduces, "step": steps}
        (out / f"scaling-{task.processes}.json").write_text(json.dumps(found), encoding="utf-8")


def run(processes: int, out: Path) -> dict[str, dict[int, float]]:
    """Measures on so many processes."""
    from ctl_core.cluster.supervisor import free_ports

    hosts = [f"127.0.0.1:{port}" for port in free_ports(processes)]
    command = [sys.executable, "-m", "benchmarks.scaling", "--measure", str(out)]
    started = []
    for index in range(processes):
        place = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
        environ = {**os.environ, "TF_CONFIG": json.dumps(place) if processes > 1 else ""}
        started.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL))
    if any(process.wait() for process in started):
        sys.exit("error: a process of the cluster failed (see above).")
    found = json.loads((out / f"scaling-{processes}.json").read_text(encoding="utf-8"))
    return {name: {int(k): v for k, v in values.items()} for name, values in found.items()}


def fit(reduces: dict[int, dict[int, float]]) -> tuple[float, float]:
    """Fits a ring's time: 2 (N - 1) latency + 2 (N - 1) / N bytes / bandwidth.

    Args:
        reduces: by number of processes N, seconds by float32 numbers

    Returns:
        Seconds for a message, and bytes per second; least squares of the relative error.
    """
    import numpy as np

    rows, ones = [], []
    for n, times in reduces.items():
        for size, seconds in times.items():
            rows.append([2 * (n - 1) / seconds, 2 * (n - 1) / n * 4 * size / seconds])
            ones.append(1.0)
    latency, per_byte = np.linalg.lstsq(np.array(rows), np.array(ones), rcond=None)[0]
    return float(latency), float(1 / per_byte)


def ring(n: int, size: int, latency: float, bandwidth: float) -> float:
    """Seconds of a ring all-reduce of so many float32 numbers."""
    return 2 * (n - 1) * latency + 2 * (n - 1) / n * 4 * size / bandwidth


def main() -> None:
    """Measures, fits, and prints predicted beside measured steps."""
    with tempfile.TemporaryDirectory() as folder:
        found = {n: run(n, Path(folder)) for n in (1, 2, 3)}
    clusters = {n: values["all_reduce"] for n, values in found.items() if n > 1}
    latency, bandwidth = fit(clusters)
    print(f"ring on loopback: {latency * 1e6:.0f} µs a message, {bandwidth / 1e6:.0f} MB/s")
    print("\nall-reduce, ms        " + "".join(f"{n} processes (model)   " for n in clusters))
    for size in SIZES:
        cells = [
            f"{times[size] * 1e3:8.2f} ({ring(n, size, latency, bandwidth) * 1e3:8.2f})    "
            for n, times in clusters.items()
        ]
        print(f"{size:>12,} numbers  " + "".join(cells))
    cores = os.cpu_count() or 1
    print(
        f"\nstep, ms ({cores} cores)   1 process   " + "2 processes (model)   3 processes (model)"
    )
    for width in WIDTHS:
        alone = found[1]["step"][width]
        cells = []
        for n in clusters:
            # Processes share the cores here: the work of a step stays what it is.
            predicted = alone + ring(n, parameters(width), latency, bandwidth)
            cells.append(f"{found[n]['step'][width] * 1e3:8.2f} ({predicted * 1e3:8.2f})    ")
        print(f"{parameters(width):>12,} weights  {alone * 1e3:8.2f}    " + "".join(cells))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
    else:
        main()
