"""Measures an input that takes long, on one process and on two processes with a core each.

``measure`` starts a new cluster for each way to read, and binds each process to a core. Each
process runs ``python -m benchmarks.own_rows``, and trains on examples that take about two
milliseconds each. The chief writes the seconds per step of each segment to a file.
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes import time_cluster
from benchmarks.report import ALONE, OWN_ROWS, WHOLE_INPUT, Timing

# The number of random numbers that an example draws, which takes about two milliseconds.
NUMBERS = 100_000
FEATURES = 16  # the inputs of the MLP
EXAMPLES = 1000
BATCH = 32
SEGMENT = 8
WARM = 2


class Way(NamedTuple):
    """A way to read the data.

    Attributes:
        processes: the number of processes
        is_marked: whether each process prepares only its own rows
    """

    processes: int
    is_marked: bool


WAYS = {
    ALONE: Way(1, is_marked=True),
    "engine": Way(2, is_marked=True),
    WHOLE_INPUT: Way(2, is_marked=False),
}


def measure(rounds: int) -> list[Timing]:
    """Starts a cluster for each way to read, one after another; returns the times."""
    times = {
        name: time_cluster("benchmarks.own_rows", name, rounds, way.processes, bind=True)
        for name, way in WAYS.items()
    }
    return [Timing(*OWN_ROWS, name, seconds) for name, seconds in times.items()]


def _train(way: Way, rounds: int, runs: Path) -> list[float]:
    """Trains, and returns the seconds per step of each segment."""
    import tensorflow as tf

    import ctl_core
    from benchmarks.peers import callbacks, settings
    from benchmarks.workloads import mlp

    work = mlp()

    def prepare(index: tf.Tensor) -> Any:
        numbers = tf.random.stateless_normal([NUMBERS], tf.stack([index, 7]))
        return numbers[:FEATURES], index % 10

    def create_dataset() -> tf.data.Dataset:
        examples = tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES)
        if way.is_marked:
            examples = ctl_core.data.own_rows(examples)
        return examples.map(prepare, tf.data.AUTOTUNE).batch(BATCH)

    stamps: list[float] = []
    hooks = callbacks(
        work,
        create_dataset=create_dataset,
        every_steps={SEGMENT: lambda: stamps.append(time.perf_counter())},
    )
    steps = SEGMENT * (1 + WARM + rounds)
    config = settings(work, str(runs), steps=steps, batch_size=BATCH, run_name="benchmark")
    ctl_core.train(hooks, config)
    return [(end - start) / SEGMENT for start, end in itertools.pairwise(stamps[WARM:])]


if __name__ == "__main__":
    target = Path(sys.argv[3])
    measured = _train(WAYS[sys.argv[1]], int(sys.argv[2]), target.parent / "runs")
    if json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"] == 0:
        target.write_text(json.dumps(measured), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)
