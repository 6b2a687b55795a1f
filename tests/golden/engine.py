"""Functions that train with the engine, in this process or in new ones."""

import contextlib
import gc
import json
import linecache
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tensorflow as tf

import ctl_core
from tests.golden import ROOT

DEVICES = 5
# A command installs handlers for these signals, which it keeps until its process ends.
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# New processes must find the lean sitecustomize, the engine and these tests.
PYTHONPATH = os.pathsep.join([str(ROOT / "tests" / "helpers" / "lean"), str(ROOT)])


def start_devices() -> None:
    """Splits the CPU, and each GPU, into five logical devices before TensorFlow starts."""
    divide = tf.config.set_logical_device_configuration
    device = tf.config.LogicalDeviceConfiguration
    divide(tf.config.list_physical_devices("CPU")[0], [device()] * DEVICES)
    for gpu in tf.config.list_physical_devices("GPU"):
        divide(gpu, [device(memory_limit=2048)] * DEVICES)
    tf.config.list_logical_devices()
    # Exempts the million objects that TensorFlow creates on import from garbage collection.
    gc.freeze()


Train = Callable[..., ctl_core.State]


class Outcome(NamedTuple):
    """The exit code and the outputs of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


def train(hooks: Any, runs: Path, **settings: Any) -> ctl_core.State:
    """Trains in this process with the settings of a small run, and saves the run in ``runs``."""
    settings = {
        "steps": 16,
        "batch_size": 16,
        "learning_rate": 0.01,
        "run_name": "run",
        "runs_dir": str(runs),
        **settings,
    }
    return ctl_core.train(hooks, ctl_core.Config(**settings))


def leave_as_killed(run: Path, copy: Path) -> None:
    """Copies the folder of a run during training, as SIGKILL would leave it at this moment.

    Files of a checkpoint that is being written may vanish while they are copied. They are skipped.
    """

    with contextlib.suppress(shutil.Error):
        shutil.copytree(run, copy, dirs_exist_ok=True)


def commands_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """Returns a function that runs commands in a project's folder without starting a process."""
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("CTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Bytecode would be stale, because callbacks.py is rewritten within a second.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    # Hides warnings about retracing. They are wrong, because TensorFlow takes the functions of
    # several runs in this process for a single function.
    monkeypatch.setattr(tf.get_logger(), "level", 40)

    def run(*words: str, **environ: str) -> Outcome:
        sys.modules.pop("callbacks", None)
        linecache.clearcache()
        capfd.readouterr()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:  # noqa: PT012
            patch.setattr(sys, "argv", ["ctl_core", *words])
            for name, value in environ.items():
                patch.setenv(name, value)
            handlers = {number: signal.getsignal(number) for number in ENDING}
            try:
                runpy.run_module("ctl_core", run_name="__main__", alter_sys=True)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return Outcome(int(ended.value.code or 0), *capfd.readouterr())

    return run


def command(
    folder: Path, *words: str, environ: dict[str, str] | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m ctl_core WORDS`` in a project's folder, and returns the finished process."""
    return subprocess.run(
        command_line(*words),
        cwd=folder,
        env=environment(**(environ or {})),
        capture_output=True,
        text=True,
        timeout=600,
        **how,
    )


def command_line(*words: str) -> Sequence[str]:
    return [sys.executable, "-m", "ctl_core", *words]


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment without settings of the engine, for a new process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CTL_") and name != "TF_CONFIG"
    }
    return {**kept, "PYTHONPATH": PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "3", **more}


def start_cluster(
    command: Sequence[str], folder: Path, processes: int = 2, **how: Any
) -> list[subprocess.Popen[Any]]:
    """Starts the processes of a cluster on loopback; ``how`` is passed to ``subprocess.Popen``."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(processes)]
    workers = [f"127.0.0.1:{server.getsockname()[1]}" for server in sockets]
    for server in sockets:
        server.close()
    started = []
    for index in range(processes):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environ = environment(TF_CONFIG=json.dumps(task))
        started.append(subprocess.Popen(command, cwd=folder, env=environ, **how))
    return started


def run_cluster(folder: Path, *words: str, processes: int = 2) -> None:
    """Runs ``python -m WORDS`` in all processes of a cluster, and appends their output to a log."""
    with (folder / "cluster.log").open("ab") as log:
        command = [sys.executable, "-m", *words]
        started = start_cluster(command, ROOT, processes, stdout=log, stderr=log)
        codes = [process.wait(timeout=900) for process in started]
    assert not any(codes), (folder / "cluster.log").read_text()[-6000:]


def read_table(text: str) -> dict[str, tuple[str, list[str]]]:
    """Reads a table of cases, and returns the code and the words of each by its name.

    A case begins with the line ``== NAME -> WORDS | WORDS``, where the words must occur in an error
    message. Its code follows.
    """
    cases = {}
    for case in text.strip().removeprefix("== ").split("\n== "):
        title, _, code = case.partition("\n")
        name, _, words = title.partition(" -> ")
        cases[name] = code, words.split(" | ")
    return cases


def locate(source: str) -> list[str]:
    """Returns the location of the line marked ``# here``, as messages name it; empty if none is."""
    lines = source.splitlines()
    return [f"callbacks.py:{n}" for n, line in enumerate(lines, 1) if line.endswith("# here")]
