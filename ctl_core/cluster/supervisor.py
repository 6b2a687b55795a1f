"""A cluster on this machine: ``./train.sh --workers K`` starts K processes and watches over them.

The supervisor here only starts, ends and judges processes, and never imports TensorFlow. Each
worker is the same command line again, with a ``TF_CONFIG`` that names its place in the cluster.
Worker 0 is the chief and has the supervisor's console; what the others print is kept in
``runs/NAME/worker-<i>.log``.

A cluster in which one process is gone cannot go on: collectives wait for all. So the supervisor
stops the others and starts all of them again, from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctl_core.cluster.signals import Signals
from ctl_core.run.errors import PeerLost, RunError, SetupError

if TYPE_CHECKING:
    from ctl_core.run.settings import Config

# Names the file descriptor of a pipe that ends when the supervisor does.
PIPE = "SUPERVISOR_PIPE"
# How often the supervisor looks around (seconds).
TICK = 0.1
# After one worker failed, how long the others may take to end by themselves (seconds).
PEER_GRACE = 5.0
# Exit codes of a worker that has done what it was told to.
ORDERLY = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
# Those of one that has lost another: TensorFlow raises, or aborts.
CONSEQUENCES = (PeerLost.exit_code, -signal.SIGABRT)

_pipes: list[int] = []


def is_supervised() -> bool:
    """Whether this process is a worker that a supervisor has started."""
    return bool(_pipes)


def die_with_supervisor() -> None:
    """In a worker, starts a thread that ends it, and what it started, when its supervisor ends."""
    if pipe := os.environ.pop(PIPE, ""):
        _pipes.append(int(pipe))
        os.set_inheritable(int(pipe), False)
        threading.Thread(target=_wait_for_end, args=(int(pipe),), daemon=True).start()


def _wait_for_end(pipe: int) -> None:
    os.read(pipe, 1)
    os.killpg(os.getpid(), signal.SIGKILL)


def start_cluster(argv: Sequence[str], config: Config) -> int:
    """Trains in a cluster of ``config.workers`` processes; returns the exit code of the command.

    Args:
        argv: the command line, which the workers get as it is, with their number and the run's
            name, which config.yaml may have said
        config: the settings that it means; the run has a name
    """
    workers, name = config.workers, config.run_name
    assert name is not None
    # Virtual devices are the CPU's, yet TensorFlow would take the GPUs' memory.
    gpus = [] if config.virtual_devices > 1 else find_gpus(os.environ)
    return supervise(
        [sys.executable, "-m", "ctl_core", *argv, "--workers", str(workers), "--run-name", name],
        Path(config.runs_dir) / name,
        share_gpus(gpus, workers),
        config.max_restarts,
    )


def find_gpus(environ: Mapping[str, str]) -> list[str]:
    """Names the GPUs as ``CUDA_VISIBLE_DEVICES`` does, or, without it, as nvidia-smi lists them."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)


def share_gpus(gpus: Sequence[str], workers: int) -> list[str]:
    """Returns a value of ``CUDA_VISIBLE_DEVICES`` for each worker.

    Raises:
        SetupError: the GPUs cannot be shared out evenly.
    """
    each, left = divmod(len(gpus), workers)
    if left:
        raise SetupError(
            f"workers: {workers} workers cannot share {len(gpus)} GPUs evenly; take a number that "
            "divides it, or choose GPUs with CUDA_VISIBLE_DEVICES (empty: train on the CPU)."
        )
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(workers)]


def supervise(
    command: Sequence[str],
    folder: Path,
    gpus: Sequence[str],
    max_restarts: int = 3,
    peer_grace: float = PEER_GRACE,
) -> int:
    """Starts workers, again after a crash, until they are done; returns the exit code.

    No process of the cluster is left when this returns or raises, nor when it is killed.

    Args:
        command: what each worker runs
        folder: the run folder, for the logs
        gpus: ``CUDA_VISIBLE_DEVICES`` of each worker
        max_restarts: how often all are started again after a crash, in total
        peer_grace: see ``PEER_GRACE``

    Raises:
        SetupError, RunError: a worker has ended with exit code 2 or 1, as starting it again would;
            or restarts are used up.
        KeyboardInterrupt: at a second SIGINT.
    """
    with Signals() as signals:
        for restarts in range(max_restarts + 1):
            with start_workers(command, folder, gpus) as workers:
                ends = _watch(workers, signals, peer_grace)
            failed = [index for index in sorted(ends) if ends[index] in (1, 2)]
            crashed = [index for index in ends if ends[index] not in ORDERLY]
            if 0 in failed or not crashed:  # the chief has shown its own error
                return ends[min(ends)]
            if failed:
                index = failed[0]
                why = f"{_find_error(folder, index)} ({_log(folder, index)})"
                raise (SetupError if ends[index] == 2 else RunError)(f"worker {index}: {why}")
            if signals.received:
                return 128 + signals.received
            cause = min(crashed, key=lambda index: ends[index] in CONSEQUENCES)
            end = f"{_describe_end(cause, ends[cause])} ({_log(folder, cause)})"
            if restarts < max_restarts:
                again = f"restarting from the last checkpoint ({restarts + 1} of {max_restarts})"
                print(f"warning: {end}; {again}", flush=True)
    raise RunError(f"{end}, and max_restarts is {max_restarts}; giving up.")


def _describe_end(index: int, code: int) -> str:
    if code < 0:
        return f"worker {index} was killed by {signal.Signals(-code).name}"
    return f"worker {index} ended with exit code {code}"


def _find_error(folder: Path, index: int) -> str:
    """Returns the last error that a worker has written into its log."""
    lines = _log(folder, index).read_text(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else "ended without an error"


def _log(folder: Path, worker: int) -> Path:
    """Where a worker's log is; the chief's is that of the run, which it writes itself."""
    return folder / (f"worker-{worker}.log" if worker else "train.log")


def free_ports(count: int) -> list[int]:
    """Returns different ports of the loopback device that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def start_workers(
    command: Sequence[str], folder: Path, gpus: Sequence[str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yields the processes of one start of the cluster, none of which outlives it."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(gpus))]
    workers: list[subprocess.Popen[bytes]] = []
    pipe, ours = os.pipe()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for index, of_worker in enumerate(gpus):
            task = {"type": "worker", "index": index}
            environ = {
                **os.environ,
                "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
                "CUDA_VISIBLE_DEVICES": of_worker,
                PIPE: str(pipe),
                # What was printed before a crash is to be in the log.
                "PYTHONUNBUFFERED": "1",
                # So that all go through a set of texts, such as class names, in one order.
                "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            }
            with contextlib.ExitStack() as opened:
                log = opened.enter_context(_log(folder, index).open("ab")) if index else None
                worker = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    pass_fds=(pipe,),
                    start_new_session=True,
                )
            workers.append(worker)
        yield workers
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)  # and what it has started itself
            worker.wait()
        os.close(pipe)
        os.close(ours)


def _watch(
    workers: Sequence[subprocess.Popen[bytes]], signals: Signals, peer_grace: float
) -> dict[int, int]:
    """Waits until every worker has ended; after one has failed, no longer than ``peer_grace``.

    Returns:
        The exit codes of those that have ended, in their order.
    """
    ends: dict[int, int] = {}
    told, deadline = 0, float("inf")
    while len(ends) < len(workers) and time.monotonic() < deadline:
        for number in signals.numbers[told:]:
            told += 1
            for worker in workers:
                worker.send_signal(number)
        for index, worker in enumerate(workers):
            if index not in ends and (code := worker.poll()) is not None:
                ends[index] = code
                if code not in ORDERLY:  # the others wait for it in vain
                    deadline = min(deadline, time.monotonic() + peer_grace)
        time.sleep(TICK)
    return ends
