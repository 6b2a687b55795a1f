"""Compares the engine with the loops of TensorFlow's guides in a cluster of two processes.

``measure`` starts a new cluster for each loop, because a process can join only one cluster. Each
process of the cluster runs ``python -m benchmarks.processes``, and trains the MLP. The chief writes
the seconds per step of each segment to a file.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import CLUSTER, IN_GRAPH, TEXTBOOK, Timing

PROCESSES = 2
SEGMENT = 100
WARM = 2


def measure(rounds: int) -> list[Timing]:
    """Starts a cluster for each loop, one after another; returns the times."""
    return [
        Timing(*CLUSTER, name, time_cluster("benchmarks.processes", name, rounds, PROCESSES))
        for name in LOOPS
    ]


def time_cluster(
    module: str, name: str, rounds: int, processes: int, bind: bool = False
) -> list[float]:
    """Starts the processes of a cluster, and waits for them; returns the times that they measured.

    Args:
        module: the module that each process runs, with the name, the number of rounds and the file
            for the times as its arguments
        name: the name of the peer
        rounds: the number of rounds
        processes: the number of processes; a single one needs no cluster
        bind: whether each process is bound to a core of its own
    """
    from ctl_core.cluster.supervisor import find_free_ports

    hosts = [f"127.0.0.1:{port}" for port in find_free_ports(processes)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        words = [sys.executable, "-m", module, name, str(rounds), str(file)]
        started = []
        for index in range(processes):
            place = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
            environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
            if processes > 1:
                environ["TF_CONFIG"] = json.dumps(place)
            binding = ["taskset", "--cpu-list", str(index)] if bind else []
            quiet = subprocess.DEVNULL
            started.append(subprocess.Popen([*binding, *words], env=environ, stdout=quiet))
        if any([process.wait() for process in started]):
            raise SystemExit(f"error: {module}: {name} ended early, see above.")
        seconds: list[float] = json.loads(file.read_text(encoding="utf-8"))
        return seconds


def _segments(run: Callable[[int], Any], rounds: int) -> list[float]:
    """Returns the seconds per step of each segment; a segment is one call of ``run``."""
    seconds = []
    for number in range(WARM + rounds):
        start = time.perf_counter()
        run(SEGMENT)
        if number >= WARM:
            seconds.append((time.perf_counter() - start) / SEGMENT)
    return seconds


def _engine(rounds: int) -> list[float]:
    import ctl_core
    from benchmarks.peers import callbacks, settings
    from benchmarks.workloads import mlp

    stamps: list[float] = []
    work = mlp().on(PROCESSES)
    hooks = callbacks(work, every_steps={SEGMENT: lambda loss: stamps.append(time.perf_counter())})
    steps = SEGMENT * (1 + WARM + rounds)
    with tempfile.TemporaryDirectory() as folder:
        shared = os.environ.get("BENCHMARK_RUNS", folder)
        ctl_core.train(hooks, settings(work, shared, steps=steps, run_name="benchmark"))
    ends = stamps[WARM:]
    return [(b - a) / SEGMENT for a, b in itertools.pairwise(ends)]


def _parts(strategy: Any) -> tuple[Any, Any]:
    """Returns the step of TensorFlow's guide, and the iterator from which it reads batches."""
    import tensorflow as tf

    from benchmarks.workloads import LEARNING_RATE, losses, mlp

    work = mlp().on(PROCESSES)
    with strategy.scope():
        model = work.create_model()
        optimizer = work.create_opt(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = strategy.experimental_distribute_dataset(work.endless().with_options(options))

    def on_replica(batch: Any) -> Any:
        inputs, labels = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses(labels, model(inputs, training=True))) / work.batch_size
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def step(iterator: Any) -> Any:
        loss = strategy.run(on_replica, (next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)

    return step, iter(data)


def _guides(in_graph: bool, rounds: int) -> list[float]:
    import tensorflow as tf

    step, iterator = _parts(tf.distribute.MultiWorkerMirroredStrategy())
    take_step = tf.function(lambda: step(iterator))

    @tf.function
    def several(steps: Any) -> Any:
        loss = 0.0
        for _ in tf.range(steps):
            loss = step(iterator)
        return loss

    def run(steps: int) -> None:
        if in_graph:
            float(several(tf.constant(steps)))
        else:
            float([take_step() for _ in range(steps)][-1])

    return _segments(run, rounds)


LOOPS: dict[str, Callable[[int], list[float]]] = {
    "engine": _engine,
    TEXTBOOK: functools.partial(_guides, False),
    IN_GRAPH: functools.partial(_guides, True),
}


if __name__ == "__main__":
    chosen = sys.argv[1]
    number = int(sys.argv[2])
    target = Path(sys.argv[3])
    os.environ["BENCHMARK_RUNS"] = str(target.parent / "runs")
    measured = LOOPS[chosen](number)
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        target.write_text(json.dumps(measured), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)
