"""Measures the time from the start of a process to the end of its first step.

The engine and Keras ``fit`` both train the MLP. The engine is started as a user starts it, by
``python -m ctl_core train`` in a project's folder. The script that calls ``fit`` is this module. A
third process only imports TensorFlow and Keras, because these imports are part of both times. Each
process writes the time at which its first step is done to a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import FIT, IMPORTS, START, Timing

_FILE = "BENCHMARK_FIRST_STEP"
_CALLBACKS = "from benchmarks import first_step\n\nglobals().update(vars(first_step.hooks()))\n"


def measure(rounds: int) -> list[Timing]:
    """Starts the processes in turn. The first round, which fills file caches, is not timed."""
    root = Path(__file__).resolve().parents[1]
    train = [sys.executable, "-m", "ctl_core", "train", "--steps", "1", "--batch-size", "32"]
    script = [sys.executable, "-m", "benchmarks.first_step"]
    commands = {"engine": train, FIT: script, IMPORTS: [*script, "imports"]}
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "callbacks.py").write_text(_CALLBACKS, encoding="utf-8")
        file = Path(folder, "done")
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        quiet = {"PYTHONPATH": path, _FILE: str(file), "TF_CPP_MIN_LOG_LEVEL": "2"}
        how: dict[str, Any] = {"cwd": folder, "env": {**os.environ, **quiet}, "check": True}
        for number in range(rounds + 1):
            for name, command in commands.items():
                begun = time.time()
                subprocess.run(command, stdout=subprocess.DEVNULL, **how)
                if number > 0:
                    times[name].append(float(file.read_text(encoding="utf-8")) - begun)
    return [Timing(*START, name, seconds) for name, seconds in times.items()]


def note_first_step() -> None:
    """Writes the current time to the file, because the first step is done."""
    Path(os.environ[_FILE]).write_text(str(time.time()), encoding="utf-8")


def hooks() -> Any:
    """Returns the hooks that train the MLP."""
    from benchmarks.peers import callbacks
    from benchmarks.workloads import mlp

    return callbacks(mlp(), at_step={1: note_first_step})


def fit() -> None:
    """Trains the MLP with Keras."""
    import keras

    from benchmarks.peers import compiled
    from benchmarks.workloads import mlp

    work = mlp()

    def note(_batch: int, logs: Any = None) -> None:  # noqa: ARG001  (Keras passes logs by name)
        note_first_step()

    first = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model = compiled(work, 1)
    model.fit(work.endless(), steps_per_epoch=1, verbose=0, shuffle=False, callbacks=[first])


def import_only() -> None:
    """Imports TensorFlow and Keras, which any training needs."""
    import keras
    import tensorflow as tf

    assert keras.backend.backend() == "tensorflow"
    assert tf.executing_eagerly()
    note_first_step()


if __name__ == "__main__":
    if sys.argv[1:] == ["imports"]:
        import_only()
    else:
        fit()
