"""Implements ``--workers K``, which trains in a cluster of K processes on this machine.

The process of ``./train.sh --workers K`` is the supervisor, which never imports TensorFlow. It
starts K workers with the same command line, and tells each its place in the cluster in
``TF_CONFIG``. Worker 0 is the chief and prints to the supervisor's console. The output of the other
workers is written to ``runs/NAME/worker-<i>.log``.

A cluster cannot continue after one process is gone, because collectives wait for all processes. The
supervisor then stops the remaining workers, and restarts all workers from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from ctl_core.cluster.background import list_inherited
from ctl_core.cluster.signals import Signals
from ctl_core.run.errors import PeerLost, RunError, SetupError
from ctl_core.run.files import prepare_output

if TYPE_CHECKING:
    from ctl_core.run.settings import Config

Worker: TypeAlias = subprocess.Popen[bytes]
# The exit codes of the workers that have ended, by their index.
ExitCodes: TypeAlias = dict[int, int]

# The environment variable with the file descriptor of a pipe that is closed when the supervisor
# ends.
PIPE = "SUPERVISOR_PIPE"
# The maximum time that the other workers have to end by themselves after one has failed (seconds).
PEER_GRACE = 5.0
# The exit codes of a worker that has trained to its end, or was stopped by a signal.
ORDERLY = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
# The exit codes of failures that a restart would repeat.
FAILED = (RunError.exit_code, SetupError.exit_code)


def die_with_supervisor() -> bool:
    """Makes this process end when its supervisor ends; returns False if it has no supervisor.

    All processes that this process has started end at the same time.
    """
    pipe = os.environ.pop(PIPE, "")
    if not pipe:
        return False
    os.set_inheritable(int(pipe), False)
    threading.Thread(target=_wait_for_end, args=(int(pipe),), daemon=True).start()
    return True


def _wait_for_end(pipe: int) -> None:
    """Kills this process's group once the other end of a pipe is closed."""
    os.read(pipe, 1)
    os.killpg(os.getpid(), signal.SIGKILL)


def start_cluster(argv: Sequence[str], config: Config) -> int:
    """Trains in a cluster of ``config.workers`` processes; returns the exit code of the command.

    Each process gets the same command line. The number of workers and the name of the run, which
    may come from config.yaml, are added to it.
    """
    name = str(config.run_name)
    command = [sys.executable, "-m", "ctl_core", *argv]
    command += ["--workers", str(config.workers), "--run-name", name]
    return supervise(command, Path(config.runs_dir) / name, config.workers, config.max_restarts)


def supervise(
    command: Sequence[str],
    folder: Path,
    workers: int,
    max_restarts: int = 3,
    peer_grace: float = PEER_GRACE,
) -> int:
    """Runs workers until they are done, with restarts after crashes; returns the exit code.

    No process of the cluster remains when this function ends, even if the supervisor is killed.

    Args:
        command: the command line of a worker
        folder: the folder of the run, for the logs
        workers: the number of workers
        max_restarts: the maximum number of times that all workers are restarted
        peer_grace: the maximum time that the other workers have to end after one has failed
            (seconds)

    Raises:
        RunError: workers have crashed, and ``max_restarts`` is reached.
        KeyboardInterrupt: a second SIGINT was received.
    """
    with Signals() as signals:
        for restarts in range(max_restarts + 1):
            with start_workers(command, folder, workers) as processes:
                codes = _watch(processes, signals, peer_grace)
            crashed = _list_crashed(codes, workers)
            if not crashed:
                return codes[0]
            ended = ", ".join(_describe_end(index, codes.get(index)) for index in crashed)
            ended += f" (see {folder})"
            failed = [index for index in sorted(crashed) if codes.get(index) in FAILED]
            if failed:
                if failed[0] > 0:  # the chief has shown its own error
                    print(f"error: {ended}", file=sys.stderr, flush=True)
                return codes[failed[0]]
            if signals.received:
                return 128 + signals.received
            if restarts < max_restarts:
                again = f"restarting from the last checkpoint ({restarts + 1} of {max_restarts})"
                print(f"warning: {ended}; {again}", flush=True)
    raise RunError(f"{ended}, and max_restarts is {max_restarts}; giving up.")


def _list_crashed(codes: ExitCodes, workers: int) -> list[int]:
    """Returns the indices of the workers that crashed.

    If all of them report a lost peer, the peer is one of the workers that have not ended. The
    indices of the workers that have not ended are then returned, too.
    """
    crashed = [index for index, code in codes.items() if code not in ORDERLY]
    if {codes[index] for index in crashed} == {PeerLost.exit_code}:
        crashed += [index for index in range(workers) if index not in codes]
    return crashed


def _describe_end(index: int, code: int | None) -> str:
    if code is None:
        return f"worker {index} did not end"
    if code < 0:
        return f"worker {index} was killed by {signal.Signals(-code).name}"
    return f"worker {index} ended with exit code {code}"


def find_free_ports(count: int) -> list[int]:
    """Returns different ports of the loopback device on which no process listens."""
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


@contextlib.contextmanager
def start_workers(command: Sequence[str], folder: Path, workers: int) -> Iterator[list[Worker]]:
    """Starts all workers, and yields their processes; kills them at the end of the context."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in find_free_ports(workers)]}
    processes: list[Worker] = []
    read_end, write_end = os.pipe()
    prepare_output("runs_dir", folder)
    try:
        for index in range(workers):
            inherited = list_inherited() if index == 0 else ()
            task = {"type": "worker", "index": index}
            place = {"cluster": cluster, "task": task, "shares_gpus": True}
            environ = {
                **os.environ,
                "TF_CONFIG": json.dumps(place),
                PIPE: str(read_end),
                # Output is not buffered, so that the log is complete up to a crash.
                "PYTHONUNBUFFERED": "1",
                # With the same hash seed, all workers iterate over a set of strings, such as class
                # names, in the same order.
                "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            }
            with _open_log(folder, index) as log:
                worker = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    pass_fds=(read_end, *inherited),
                    start_new_session=True,
                )
            processes.append(worker)
        yield processes
    finally:
        for worker in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)  # kills all processes of the worker
            worker.wait()
        os.close(read_end)
        os.close(write_end)


def _open_log(folder: Path, index: int) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    """Opens the log of a worker; None for the chief, which prints to the supervisor's console."""
    if index == 0:
        return contextlib.nullcontext()
    return (folder / f"worker-{index}.log").open("ab")


def _watch(processes: Sequence[Worker], signals: Signals, peer_grace: float) -> ExitCodes:
    """Waits until all workers have ended, and passes signals on to them; returns the exit codes.

    After a worker has failed, the others have at most ``peer_grace`` seconds to end.
    """
    codes: ExitCodes = {}
    passed_on = 0
    deadline = float("inf")
    while len(codes) < len(processes) and time.monotonic() < deadline:
        for number in signals.numbers[passed_on:]:
            passed_on += 1
            for worker in processes:
                worker.send_signal(number)
        for index, worker in enumerate(processes):
            code = worker.poll()
            if code is None or index in codes:
                continue
            codes[index] = code
            if code not in ORDERLY:  # the other workers cannot continue without this one
                deadline = min(deadline, time.monotonic() + peer_grace)
        time.sleep(0.1)
    return codes
