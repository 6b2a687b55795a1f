"""Measures the time from the start of a process to the end of its first steps.

The engine and Keras ``fit`` train the same model: the MLP up to its first step, and a Transformer
of six blocks up to step 20, on one device and on four. The engine is started as a user starts it,
by ``python -m ctl_core train`` in a project's folder. The script that calls ``fit`` is this module.
For the MLP, a third process only imports TensorFlow and Keras, because these imports are part of
both times. Each process writes the time at which its last step is done to a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import FIT, IMPORTS, START, START_OF_TRANSFORMER, Key, Timing

_FILE = "BENCHMARK_FIRST_STEP"
_START = "BENCHMARK_START"
_CALLBACKS = "from benchmarks import first_step\n\nglobals().update(vars(first_step.hooks()))\n"


class Start(NamedTuple):
    """A training whose start is measured.

    Attributes:
        key: the key of the measurement
        workload: the name of a function in ``workloads``, which returns the workload
        steps: the number of steps
    """

    key: Key
    workload: str
    steps: int

    @property
    def devices(self) -> int:
        """The number of devices, into which the CPU is split."""
        return self.key[1]


STARTS = [
    Start(START, "mlp", 1),
    *(Start((START_OF_TRANSFORMER, devices, 0), "deep_transformer", 20) for devices in (1, 4)),
]


def measure(rounds: int, device: str) -> list[Timing]:
    """Starts the processes in turn. The first round, which fills file caches, is not timed.

    Args:
        rounds: the number of rounds
        device: ``cpu`` or ``gpu``; a GPU is not split
    """
    timings = []
    for number, start in enumerate(STARTS):
        if device == "cpu" or start.devices == 1:
            timings += _measure(number, rounds)
    return timings


def _measure(number: int, rounds: int) -> list[Timing]:
    """Measures one of ``STARTS``."""
    start = STARTS[number]
    root = Path(__file__).resolve().parents[1]
    script = [sys.executable, "-m", "benchmarks.first_step"]
    train = [sys.executable, "-m", "ctl_core", "train", "--steps", str(start.steps)]
    train += ["--batch-size", str(_create_workload(start).batch_size), "--ckpt-every", "0"]
    if start.devices > 1:
        train += ["--virtual-devices", str(start.devices)]
    commands = {"engine": train, FIT: script}
    if start.key == START:
        commands[IMPORTS] = [*script, "imports"]
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "callbacks.py").write_text(_CALLBACKS, encoding="utf-8")
        file = Path(folder, "done")
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        quiet = {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
        variables = {**os.environ, **quiet, _FILE: str(file), _START: str(number)}
        how: dict[str, Any] = {"cwd": folder, "env": variables, "check": True}
        for timed in range(rounds + 1):
            for name, command in commands.items():
                begun = time.time()
                subprocess.run(command, stdout=subprocess.DEVNULL, **how)
                if timed > 0:
                    times[name].append(float(file.read_text(encoding="utf-8")) - begun)
    return [Timing(*start.key, name, seconds) for name, seconds in times.items()]


def _create_workload(start: Start) -> Any:
    """Returns the workload of a start. TensorFlow is imported here, not with this module."""
    from benchmarks import workloads

    return getattr(workloads, start.workload)().on(start.devices)


def _find_start() -> Start:
    """Returns the start that this process measures."""
    return STARTS[int(os.environ[_START])]


def note_last_step() -> None:
    """Writes the current time to the file, because the last step is done."""
    Path(os.environ[_FILE]).write_text(str(time.time()), encoding="utf-8")


def hooks() -> Any:
    """Returns the hooks that train the workload."""
    from benchmarks.peers import callbacks

    start = _find_start()
    return callbacks(_create_workload(start), at_step={start.steps: note_last_step})


def fit() -> None:
    """Trains the workload with Keras."""
    import keras
    import tensorflow as tf

    from benchmarks.peers import compiled

    start = _find_start()
    if start.devices > 1:
        device = tf.config.LogicalDeviceConfiguration()
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [device] * start.devices)
    work = _create_workload(start)

    def note(batch: int, logs: Any = None) -> None:  # noqa: ARG001  (Keras passes logs by name)
        if batch + 1 == start.steps:
            note_last_step()

    last = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    strategy = tf.distribute.get_strategy()
    if start.devices > 1:
        names = [f"CPU:{number}" for number in range(start.devices)]
        strategy = tf.distribute.MirroredStrategy(names)
    with strategy.scope():
        model = compiled(work, 1)
    quiet: dict[str, Any] = {"verbose": 0, "shuffle": False, "callbacks": [last]}
    model.fit(work.endless(), steps_per_epoch=start.steps, **quiet)


def import_only() -> None:
    """Imports TensorFlow and Keras, which any training needs."""
    import keras
    import tensorflow as tf

    assert keras.backend.backend() == "tensorflow"
    assert tf.executing_eagerly()
    note_last_step()


if __name__ == "__main__":
    if sys.argv[1:] == ["imports"]:
        import_only()
    else:
        fit()
