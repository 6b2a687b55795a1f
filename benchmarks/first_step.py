"""The time from a process's start to the end of its first step: the engine's, or Keras ``fit``'s.

Both train the MLP. The engine is started as a user starts it: ``python -m ctl_core train`` in a
project's folder, and the ``train.sh`` of a generated project in an environment that is there; this
module, run by itself, is the script with ``fit``. When the first step is done, each process writes
the time and the most memory that it has used to a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import TRAIN_SH, Timing, memory_peak

_FILE = "BENCHMARK_FIRST_STEP"
_CALLBACKS = "from benchmarks import first_step\n\nglobals().update(vars(first_step.hooks()))\n"


def measure(rounds: int) -> list[Timing]:
    """Starts the processes in turn, after one of each that nobody times: files get cached."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        project = _project(root, Path(folder))
        (project / "callbacks.py").write_text(_CALLBACKS, encoding="utf-8")
        file = Path(folder) / "first_step.json"
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        quiet = {"PYTHONPATH": path, _FILE: str(file), "TF_CPP_MIN_LOG_LEVEL": "2"}
        quiet["VENV"] = sys.prefix  # for train.sh, which would make one
        run, one_step = [sys.executable, "-m"], ["--steps", "1", "--batch-size", "32"]
        commands = {
            "engine": [*run, "ctl_core", "train", *one_step],
            TRAIN_SH: ["./train.sh", *one_step],
            "Keras fit": [*run, "benchmarks.first_step"],
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for number in range(rounds + 1):
            for name, words in commands.items():
                begun = time.time()
                subprocess.run(
                    words,
                    cwd=project,
                    env={**os.environ, **quiet},
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                done, peak = json.loads(file.read_text(encoding="utf-8"))
                if number > 0:
                    found[name].append((done - begun, peak))
    return [
        Timing(
            "first step",
            1,
            0,
            name,
            [seconds for seconds, _ in several],
            max(p for _, p in several),
        )
        for name, several in found.items()
    ]


def _project(root: Path, folder: Path) -> Path:
    """Generates a project."""
    command = [sys.executable, "-m", "cookiecutter", str(root), "--no-input", "--default-config"]
    command += ["--output-dir", str(folder), "example=blank"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "my_training"


def done() -> None:
    """Writes down that the first step is done."""
    text = json.dumps([time.time(), memory_peak()])
    Path(os.environ[_FILE]).write_text(text, encoding="utf-8")


def hooks() -> Any:
    """The MLP as the engine's hooks."""
    from benchmarks.peers import callbacks
    from benchmarks.workloads import mlp

    return callbacks(mlp(), at_step={1: done})


def fit() -> None:
    """The MLP with Keras."""
    import keras

    from benchmarks.peers import compiled
    from benchmarks.workloads import mlp

    class First(keras.callbacks.Callback):
        """Notes the first step."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            done()

    work = mlp()
    model = compiled(work, 1)
    model.fit(work.endless(), steps_per_epoch=1, verbose=0, shuffle=False, callbacks=[First()])


if __name__ == "__main__":
    fit()
