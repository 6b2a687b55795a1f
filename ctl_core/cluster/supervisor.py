"""A cluster on this machine: ``./train.sh --workers K`` starts K processes and watches over them.

The supervisor here never imports TensorFlow. Each worker is the same command line again, with a
``TF_CONFIG`` that names its place in the cluster. Worker 0 is the chief and has the supervisor's
console; what the others print is kept in ``runs/NAME/worker-<i>.log``.

A cluster in which one process is gone cannot go on: collectives wait for all. So the supervisor
stops the others and starts all of them again, from the last checkpoint.
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
from typing import TYPE_CHECKING

from ctl_core.cluster.signals import Signals
from ctl_core.run.errors import PeerLost, RunError, SetupError

if TYPE_CHECKING:
    from ctl_core.run.settings import Config

# Names the file descriptor of a pipe that ends when the supervisor does.
PIPE = "SUPERVISOR_PIPE"
# After one worker failed, how long the others may take to end by themselves (seconds).
PEER_GRACE = 5.0
# Exit codes of a worker that has done what it was told to; and those that a new start would have.
ORDERLY = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
FAILED = (RunError.exit_code, SetupError.exit_code)


def die_with_supervisor() -> bool:
    """Returns whether this is a worker; it, and what it has started, end with the supervisor."""

    def wait_for_end(pipe: int) -> None:
        os.read(pipe, 1)
        os.killpg(os.getpid(), signal.SIGKILL)

    if pipe := os.environ.pop(PIPE, ""):
        os.set_inheritable(int(pipe), False)
        threading.Thread(target=wait_for_end, args=(int(pipe),), daemon=True).start()
    return bool(pipe)


def start_cluster(argv: Sequence[str], config: Config) -> int:
    """Trains in a cluster of ``config.workers`` processes; returns the exit code of the command.

    Each gets the command line with their number and the run's name, which config.yaml may have.
    """
    workers, name = config.workers, str(config.run_name)
    command = [sys.executable, "-m", "ctl_core", *argv, "--workers", str(workers)]
    folder = Path(config.runs_dir) / name
    return supervise([*command, "--run-name", name], folder, workers, config.max_restarts)


def supervise(
    command: Sequence[str],
    folder: Path,
    workers: int,
    max_restarts: int = 3,
    peer_grace: float = PEER_GRACE,
) -> int:
    """Starts workers, again after a crash, until they are done; returns the exit code.

    No process of the cluster is left when this returns or raises, nor when it is killed. ``folder``
    is the run folder, for the logs.

    Raises:
        RunError: restarts are used up.
        KeyboardInterrupt: at a second SIGINT.
    """
    with Signals() as signals:
        for restarts in range(max_restarts + 1):
            with start_workers(command, folder, workers) as started:
                codes = _watch(started, signals, peer_grace)
            crashed = [index for index, code in codes.items() if code not in ORDERLY]
            if not crashed:
                return codes[0]
            if {codes[index] for index in crashed} == {PeerLost.exit_code}:  # whom they miss
                crashed += [index for index in range(workers) if index not in codes]
            ended = ", ".join(_describe_end(index, codes.get(index)) for index in crashed)
            ended += f" (see {folder})"
            if failed := [index for index in sorted(crashed) if codes.get(index) in FAILED]:
                if failed[0] > 0:  # the chief has shown its own error
                    print(f"error: {ended}", file=sys.stderr, flush=True)
                return codes[failed[0]]
            if signals.received:
                return 128 + signals.received
            if restarts < max_restarts:
                again = f"restarting from the last checkpoint ({restarts + 1} of {max_restarts})"
                print(f"warning: {ended}; {again}", flush=True)
    raise RunError(f"{ended}, and max_restarts is {max_restarts}; giving up.")


def _describe_end(index: int, code: int | None) -> str:
    if code is None:
        return f"worker {index} did not end"
    if code < 0:
        return f"worker {index} was killed by {signal.Signals(-code).name}"
    return f"worker {index} ended with exit code {code}"


def find_free_ports(count: int) -> list[int]:
    """Returns different ports of the loopback device that nobody listens on."""
    with contextlib.ExitStack() as held:
        some = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in some]


@contextlib.contextmanager
def start_workers(
    command: Sequence[str], folder: Path, workers: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yields the processes of one start of the cluster, none of which outlives it."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in find_free_ports(workers)]}
    started: list[subprocess.Popen[bytes]] = []
    pipe, ours = os.pipe()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for index in range(workers):
            task = {"type": "worker", "index": index}
            place = {"cluster": cluster, "task": task, "shares_gpus": True}
            environ = {
                **os.environ,
                "TF_CONFIG": json.dumps(place),
                PIPE: str(pipe),
                # What was printed before a crash is to be in the log.
                "PYTHONUNBUFFERED": "1",
                # So that all go through a set of texts, such as class names, in one order.
                "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            }
            own = (folder / f"worker-{index}.log").open("ab") if index else contextlib.nullcontext()
            with own as log:
                worker = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    pass_fds=(pipe,),
                    start_new_session=True,
                )
            started.append(worker)
        yield started
    finally:
        for worker in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)  # and what it has started itself
            worker.wait()
        os.close(pipe)
        os.close(ours)


def _watch(
    workers: Sequence[subprocess.Popen[bytes]], signals: Signals, peer_grace: float
) -> dict[int, int]:
    """Waits until all have ended, ``peer_grace`` at most after a failure; returns exit codes."""
    codes: dict[int, int] = {}
    told, deadline = 0, float("inf")
    while len(codes) < len(workers) and time.monotonic() < deadline:
        for number in signals.numbers[told:]:
            told += 1
            for worker in workers:
                worker.send_signal(number)
        for index, worker in enumerate(workers):
            if index not in codes and (code := worker.poll()) is not None:
                codes[index] = code
                if code not in ORDERLY:  # the others wait for it in vain
                    deadline = min(deadline, time.monotonic() + peer_grace)
        time.sleep(0.1)
    return codes
