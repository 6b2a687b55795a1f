"""Kills training at each of its file operations: ``make soak``.

``python -m scripts.soak_operations FOLDER --kills 1200`` trains a tiny program on two replicas,
each of which draws its own random numbers, with ``--keep-best`` and a manager that removes old
checkpoints. A run is killed (SIGKILL) immediately before its N-th file operation, started again,
killed again, and so on. N takes each value up to the number of operations of a complete run, in
random order. In the end, each run is trained to its last step. Its last checkpoint and metrics must
then equal those of a run that was never killed, bit for bit.

A start takes longer than the steps of a run. Therefore, all processes are forks of a process that
has imported TensorFlow but not initialized it, and graphs are not optimized. kill_at.c counts the
operations; it needs a C compiler and Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import ctl_core
import ctl_core.commands.train  # here, so that forks need not import it
from scripts.proof import noisy

SOURCE = Path(__file__).with_name("kill_at.c")
STEPS = 8
# A start of a run with steps left performs at least this many operations.
MOST_AT_START = 30
# The maximum number of kills of a run.
KILLS = 8
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "batch_size": 16,
    "virtual_devices": 2,
    "ckpt_every": 2,
    "eval_every": 2,
    "keep_best": "loss",
    "deterministic": True,
}


class Result(NamedTuple):
    """The results of a process that has trained a run to its end.

    Attributes:
        digest: a digest of all tensors of the last checkpoint and of the metrics
        operations: the number of file operations
        modules: the names of the imported modules
    """

    digest: str
    operations: int
    modules: list[str]


def prepare_process(folder: Path) -> None:
    """Compiles kill_at.c and restarts this program with it; returns only in the new process."""
    library = folder / "kill_at.so"
    if os.environ.get("LD_PRELOAD") == str(library):
        return
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    environ = {**os.environ, "LD_PRELOAD": str(library), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "scripts.soak_operations", *sys.argv[1:]]
    os.execve(sys.executable, command, environ)


def start(folder: Path, operation: int) -> int:
    """Trains a run in a forked process, which is killed before an operation.

    Args:
        folder: the folder with the run and its log
        operation: the number of the operation; 0: the process is not killed

    Returns:
        The exit code; negative if the process was killed.
    """
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = train(folder, operation)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def train(folder: Path, operation: int) -> int:
    """Trains a run to its end and writes its ``Result``; runs in a forked process."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    kill_at = ctypes.CDLL(os.environ["LD_PRELOAD"])
    kill_at.kill_at_arm(os.fsencode(folder / "run"), ctypes.c_long(operation))
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    config = ctl_core.Config(**SETTINGS, runs_dir=str(folder), run_name="run")
    ctl_core.train(noisy, config)
    operations = int(kill_at.kill_at_count())
    result = Result(read_digest(folder / "run"), operations, [*sys.modules])
    (folder / "result.json").write_text(json.dumps(result))
    return 0


def read_digest(run: Path) -> str:
    """Returns a digest of the last checkpoint and of the metrics."""
    digest = hashlib.sha256((run / "metrics.jsonl").read_bytes())
    prefixes = [f"ckpt-{STEPS}", f"engine/ckpt-{STEPS}", f"engine/statistics-{STEPS}-0"]
    for prefix in prefixes:
        reader = tf.train.load_checkpoint(str(run / "ckpt" / prefix))
        for key in sorted(reader.get_variable_to_shape_map()):
            # The position in the data is serialized differently in each process, and the graph of
            # objects depends on the step from which the process started.
            if "ITERATOR" in key or "_CHECKPOINTABLE_OBJECT_GRAPH" in key or "save_counter" in key:
                continue
            digest.update(key.encode())
            digest.update(np.ascontiguousarray(reader.get_tensor(key)).tobytes())
    return digest.hexdigest()


def read_result(folder: Path) -> Result:
    return Result(*json.loads((folder / "result.json").read_text()))


def import_modules(names: list[str]) -> None:
    """Imports modules, so that forks need not, and exempts them from garbage collection."""
    for name in names:
        with contextlib.suppress(Exception):  # some modules can only be imported by another module
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


class Operations:
    """Chooses the operations before which runs are killed; repeats none before all were chosen.

    The first start of a run may be killed before any operation. A resumed run performs fewer
    operations.
    """

    def __init__(self, operations: int, seed: int) -> None:
        self._operations = operations
        self._draw = random.Random(seed)
        self._unused: dict[bool, list[int]] = {}

    def choose(self, run: Path, is_resumed: bool) -> int:
        """Returns the number of an operation that the next start of a run can reach."""
        most = self._operations
        if is_resumed:
            steps = [int(path.stem[5:]) for path in run.glob("ckpt/engine/ckpt-*.json")]
            left = 1 - max(steps, default=0) / STEPS
            most = max(MOST_AT_START, int(left * self._operations))
        unused = self._unused.get(is_resumed, [])
        fitting = [number for number in unused if number <= most]
        if not fitting:
            unused = self._draw.sample(range(1, self._operations + 1), self._operations)
            fitting = [number for number in unused if number <= most]
            self._unused[is_resumed] = unused
        unused.remove(fitting[0])
        return fitting[0]


def soak(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kills and resumes runs until the number of kills is reached.

    Returns:
        The counts for the report.

    Raises:
        AssertionError: a run could not be resumed, or its weights or metrics differ.
    """
    whole = folder / "whole"
    whole.mkdir()
    code = start(whole, 0)
    assert code == 0, (whole / "log").read_text()
    expected = read_result(whole)
    import_modules(expected.modules)
    operations = Operations(expected.operations, seed)
    counts = {"operations": expected.operations, "runs": 0, "kills": 0, "kills of first starts": 0}
    for number in itertools.count():
        place = folder / f"killed-{number}"
        place.mkdir()
        kill_and_resume(place, operations, counts, kills)
        assert read_result(place).digest == expected.digest, f"{place}: other weights or metrics"
        counts["runs"] += 1
        print(json.dumps(counts), flush=True)
        if counts["kills"] >= kills:
            return counts
        shutil.rmtree(place)
    raise AssertionError


def kill_and_resume(
    place: Path, operations: Operations, counts: dict[str, int], kills: int
) -> None:
    """Trains a run to its end, with a kill in each start that reaches the chosen operation.

    Args:
        place: the folder of the run
        operations: chooses the operations
        counts: the counts for the report, to which the kills are added
        kills: the maximum number of kills in all runs

    Raises:
        AssertionError: the run could not be resumed.
    """
    history: list[int] = []
    while True:
        operation = 0
        if counts["kills"] < kills and len(history) < KILLS:
            operation = operations.choose(place / "run", is_resumed=bool(history))
        code = start(place, operation)
        if code == 0:
            return
        report = (
            f"{place}: killed before the operations {history}, it cannot be resumed:\n"
            f"{(place / 'log').read_text()[-3000:]}"
        )
        assert code == -signal.SIGKILL, report
        assert operation, report
        counts["kills"] += 1
        counts["kills of first starts"] += not history
        history.append(operation)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak_operations", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    settings = parser.parse_args()
    folder = settings.folder.absolute()
    prepare_process(folder)
    begun = time.monotonic()
    counts = soak(folder, settings.kills, settings.seed)
    minutes = (time.monotonic() - begun) / 60
    print(
        f"{counts['kills']} kills in {counts['runs']} runs, {counts['kills of first starts']} of "
        f"them in a first start, which has {counts['operations']} file operations: all runs were "
        f"resumed and have equal bits; {minutes:.0f} min, seed {settings.seed}, engine "
        f"{ctl_core.__version__}"
    )


if __name__ == "__main__":
    main()
