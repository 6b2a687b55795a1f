"""Measures sections of the benchmark in one process, whose number of devices is fixed.

``python -m benchmarks.worker DEVICE DEVICES ROUNDS FILE SECTION...`` writes a line of JSON for each
result. A section is ``evaluation``, ``checkpoints``, ``memory``, ``logical``, ``shards``, or a
workload with the number of steps between two reads of the loss, such as ``mlp/50``. On a GPU, a
dtype policy can be added: ``mlp/50/mixed_float16``.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from benchmarks.pace import Pace, timed
from benchmarks.peers import (
    EVALUATED,
    PEERS,
    callbacks,
    compiled,
    engine,
    evaluate,
    evaluated,
    settings,
)
from benchmarks.report import (
    COMPILED,
    EVALUATE,
    EVALUATE_MANY,
    FIT,
    FLOOR,
    INPUT,
    LOGICAL,
    MANY,
    MICRO_BATCHES,
    SAVING,
    SHARDS,
    TEXTBOOK,
    UNCOMPILED,
    Memory,
    Timing,
)
from benchmarks.workloads import WORKLOADS, Workload
from ctl_core.cluster.strategy import prepare
from ctl_core.cluster.task import count_cores

# The workloads that are also measured compiled. On a CPU, XLA's convolutions are slow, and so is
# compiling them. On a GPU, Keras' LSTM uses cuDNN, which XLA cannot compile.
JITTED = {"cpu": "mlp lstm transformer embedding", "gpu": "mlp cnn transformer embedding"}


def steps(
    work: Workload,
    devices: int,
    every: int,
    rounds: int,
    names: tuple[str, ...] | None = None,
    device: str = "cpu",
) -> Iterator[Timing]:
    """Times the peers on a workload, after checking that they train the same weights.

    Args:
        work: the workload
        devices: the number of devices
        every: the number of steps after which the loss is read on the host
        rounds: the number of times that each peer is timed
        names: the peers; by default all that can train the workload
        device: ``cpu`` or ``gpu``
    """
    work = work.on(devices)
    strategy = _strategy(devices)
    names = names or tuple(name for name in PEERS if _fits(name, device, work, devices, every))
    loops = {name: functools.partial(PEERS[name], work, strategy, every) for name in names}
    paced_as_compiled = {COMPILED}
    if device == "gpu":
        paced_as_compiled.add("engine")
    paces = {
        name: Pace(loop, work.segment_of(name in paced_as_compiled)) for name, loop in loops.items()
    }
    yield from _rounds(Title(work.name, devices, every), paces, rounds, work.tolerance)


def _fits(name: str, device: str, work: Workload, devices: int, every: int) -> bool:
    workload = work.name.partition(",")[0]
    if workload == "images":  # the time of the input hides the differences between the loops
        return name in ("engine", FIT, TEXTBOOK, INPUT)
    often = devices == 1 and every == 50
    if name == COMPILED:
        is_default = device == "gpu" and work.policy == "float32"
        return often and workload in JITTED[device].split() and not is_default
    if name == UNCOMPILED:
        return often and device == "gpu" and work.policy == "float32"
    if work.policy != "float32":  # the hand-written loops do not scale the loss
        return name in ("engine", FIT, MANY)
    if name in (FLOOR, INPUT):
        return often
    return name != MANY or every > 1


def _strategy(devices: int) -> tf.distribute.Strategy:
    """Returns the strategy of all peers except the engine, which creates its own.

    The peers sum gradients in the same way as the engine. By default, TensorFlow uses collective
    operations on CPU devices. With these, the peers would be several times slower, and two loops in
    one process could not run at the same time.
    """
    if devices == 1:
        return tf.distribute.get_strategy()
    names = [f"CPU:{index}" for index in range(devices)]
    return tf.distribute.MirroredStrategy(names, tf.distribute.ReductionToOneDevice())


class Title(NamedTuple):
    """What is timed: the workload, the devices, and after how many steps the loss is read."""

    name: str
    devices: int
    every: int


def _rounds(
    title: Title,
    paces: dict[str, Pace],
    rounds: int,
    tolerance: float,
    warm: int = 1,
) -> Iterator[Timing]:
    """Checks the weights of the loops, warms them up, times them, and ends them."""
    reference: list[Any] | None = None
    for peer, pace in paces.items():
        begun = time.perf_counter()
        pace.advance()
        seconds = time.perf_counter() - begun
        note = f"{title.name}, {title.devices} devices, {peer}: {seconds:.1f} s to begin"
        print(note, file=sys.stderr, flush=True)
        if pace.weights is not None:
            reference = reference or pace.weights()
            check_equal(pace.weights(), reference, f"{title.name}: {peer}", tolerance)
    timed(paces, warm)
    for peer, measured in timed(paces, rounds).items():
        yield Timing(*title, peer, measured)
    for pace in paces.values():
        pace.end()
    gc.collect()


def check_equal(weights: list[Any], reference: list[Any], what: str, tolerance: float) -> None:
    """Compares the weights of two peers; for ``tolerance``, see ``Workload``."""
    largest = max(float(np.abs(other).max()) for other in reference)
    for weight, other in zip(weights, reference, strict=True):
        np.testing.assert_allclose(weight, other, tolerance, tolerance * largest, err_msg=what)


def evaluation(rounds: int, *workloads: Workload) -> Iterator[Timing]:
    """Times evaluations of the same weights on the same data; a step is a batch."""
    for work in workloads:
        loops: dict[str, Callable[[Pace], None]] = {
            "engine": functools.partial(evaluate, work),
            EVALUATE: functools.partial(_evaluate_by_keras, work, 1),
            EVALUATE_MANY: functools.partial(_evaluate_by_keras, work, 50),
        }
        paces = {name: Pace(loop, EVALUATED) for name, loop in loops.items()}
        title = f"evaluation of {work.name}"
        yield from _rounds(Title(title, 1, 0), paces, rounds, work.tolerance)


def _evaluate_by_keras(work: Workload, steps_per_call: int, pace: Pace) -> None:
    model = compiled(work, steps_per_call, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    batches = evaluated(work, work.batch_size).prefetch(tf.data.AUTOTUNE)
    while True:
        values = model.evaluate(batches, verbose=0)
        pace.weights = lambda values=values: list(values)
        pace.stop()


def checkpoints(rounds: int, work: Workload) -> Iterator[Timing]:
    """Times the engine on a workload, without checkpoints and with one every 100 steps."""
    # There are ten checkpoints in a segment. A part of the last one is written after the segment,
    # and is not timed. If there were only one checkpoint, this part would distort the result.
    work = dataclasses.replace(work, segment=1000)
    strategy = _strategy(1)
    saving = functools.partial(engine, ckpt_every=100)
    loops: dict[str, Callable[..., None]] = {"engine": engine, SAVING: saving}
    paces = {
        name: Pace(functools.partial(loop, work, strategy, 50), work.segment)
        for name, loop in loops.items()
    }
    # The segments with the first two checkpoints of a run are not timed, because graphs are traced
    # for them.
    title = f"checkpoints of {work.name}"
    yield from _rounds(Title(title, 1, 50), paces, rounds, work.tolerance, warm=2)


def logical(rounds: int, devices: int, *workloads: Workload) -> Iterator[Timing]:
    """Times the engine with four logical replicas, and without; both are deterministic.

    On one device, the engine is also timed with four micro-batches. All use the same number of
    threads.
    """
    for work in workloads:
        work = work.on(devices)
        loops = {
            "engine": functools.partial(engine, deterministic=True),
            LOGICAL: functools.partial(engine, logical_replicas=4),
        }
        if devices == 1:
            loops[MICRO_BATCHES] = functools.partial(engine, deterministic=True, accumulate_steps=4)
        paces = {
            name: Pace(functools.partial(loop, work, _strategy(devices), 50), work.segment)
            for name, loop in loops.items()
        }
        title = f"{work.name}, exact"
        yield from _rounds(Title(title, devices, 50), paces, rounds, work.tolerance)


def shards(rounds: int, devices: int, *workloads: Workload) -> Iterator[Timing]:
    """Times the engine with the state of Adam divided among the devices, and without.

    Both are deterministic, because Adam would turn rounding errors into different weights.
    """
    for work in workloads:
        work = dataclasses.replace(work.on(devices), create_opt=keras.optimizers.Adam)
        whole = functools.partial(engine, deterministic=True)
        loops = {"engine": whole, SHARDS: functools.partial(whole, shard_optimizer=True)}
        paces = {
            name: Pace(functools.partial(loop, work, _strategy(devices), 50), work.segment)
            for name, loop in loops.items()
        }
        yield from _rounds(Title(f"{work.name}, Adam", devices, 50), paces, rounds, work.tolerance)


def memory(warm: int = 2000, steps_between: int = 20_000) -> Memory:
    """Measures this process's memory while the engine trains the MLP and saves every 100 steps."""
    work = WORKLOADS["mlp"]()
    used = list[float]()
    last = warm + steps_between

    def note() -> None:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])  # exists only on Linux
        used.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    reads = {50: lambda loss: float(loss)}
    hooks = callbacks(work, every_steps=reads, at_step={warm: note, last: note})
    with tempfile.TemporaryDirectory() as folder:
        ctl_core.train(hooks, settings(work, folder, steps=last, ckpt_every=100))
    return Memory(steps_between, steps_between // 100, *used)


def main(device: str, devices: int, rounds: int, file: Path, sections: list[str]) -> None:
    """Measures the sections one after another, and writes each result to the file immediately."""
    if device == "gpu" and not tf.config.list_physical_devices("GPU"):
        raise SystemExit("error: TensorFlow finds no GPU.")
    threads = None
    if "logical" in sections:  # as in a run with logical replicas, but for all peers
        threads = count_cores()
    if devices > 1 or threads is not None:  # as the engine does, but for all peers
        prepare(ctl_core.Config(steps=1, virtual_devices=devices, intra_op_threads=threads))

    def find(name: str, policy: str = "float32") -> Workload:
        work = WORKLOADS[name]()
        return work.on_gpu(policy) if device == "gpu" else work

    others: dict[str, Callable[[], Any]] = {
        "evaluation": lambda: evaluation(rounds, find("mlp"), find("cnn")),
        "checkpoints": lambda: checkpoints(rounds, find("cnn")),
        "memory": lambda: [memory()],
        "logical": lambda: logical(rounds, devices, find("mlp"), find("cnn")),
        "shards": lambda: shards(rounds, devices, find("mlp"), find("transformer")),
    }
    with file.open("a", encoding="utf-8") as out:
        for section in sections:
            if section in others:
                results = others[section]()
            else:
                name, every, *policy = section.split("/")
                results = steps(find(name, *policy), devices, int(every), rounds, device=device)
            for result in results:
                print(json.dumps(dataclasses.asdict(result)), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    # The normal end of a process would destroy distributed iterators, which may take minutes.
    os._exit(0)
