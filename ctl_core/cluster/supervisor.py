"""A cluster on this machine: ``./train.sh --workers K`` starts K processes and watches over them.

The supervisor here only starts, ends and judges processes, and never imports TensorFlow. Each
worker is the same command line again, with a ``TF_CONFIG`` that names its place in the cluster;
how it trains there is strategy.py's part. Worker 0 is the chief and has the supervisor's console;
what the others print is kept in ``runs/NAME/worker-<i>.log``.

A cluster in which one process is gone cannot go on: collectives wait for all. So the supervisor
stops the others and starts all of them again, from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ctl_core.cluster.gpus import share_gpus, visible_gpus
from ctl_core.cluster.signals import INTERRUPTED, Counted
from ctl_core.cluster.task import is_in_cluster
from ctl_core.errors import PeerLost, SetupError, reason
from ctl_core.files import is_stdout
from ctl_core.run.lock import is_locked, refuse_second

if TYPE_CHECKING:
    from ctl_core.settings import Config

# Names the file descriptor of a pipe that ends when the supervisor does.
PIPE = "SUPERVISOR_PIPE"
# How often the supervisor looks around (seconds).
TICK = 0.1
# After one worker failed, how long the others may take to end by themselves (seconds).
PEER_GRACE = 5.0
# The same after a second SIGINT (see cluster/signals.py), by which they end themselves sooner.
SIGNAL_GRACE = 1.6
# Exit codes of a worker that has done what it was told to.
ORDERLY = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)

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
    while os.read(pipe, 1):
        pass
    os.killpg(os.getpid(), signal.SIGKILL)


def start_cluster(argv: Sequence[str], config: Config) -> int:
    """Trains in a cluster of ``config.workers`` processes; returns the exit code of the command.

    Args:
        argv: the command line, which the workers get as it is, with their number and the run's
            name, which config.yaml may have said
        config: the settings that it means; the run has a name

    Raises:
        SetupError: the cluster cannot be started here, or the run is being trained.
    """
    workers, name, devices = config.workers, config.run_name, config.virtual_devices
    assert name is not None
    if is_in_cluster():
        raise SetupError(
            f"workers: {workers} are to be started here, but this process is to join the cluster "
            "of TF_CONFIG; leave out one of them."
        )
    shares = None
    if gpus := visible_gpus(os.environ):
        # Virtual devices are the CPU's, yet TensorFlow would take the GPUs' memory.
        shares = [""] * workers if devices > 1 else share_gpus(gpus, workers)
    return supervise(
        [sys.executable, "-m", "ctl_core", *argv, "--workers", str(workers), "--run-name", name],
        Path(config.runs_dir) / name,
        workers,
        max_restarts=config.max_restarts,
        gpus=shares,
    )


def supervise(
    command: Sequence[str],
    folder: Path,
    workers: int,
    max_restarts: int = 3,
    gpus: Sequence[str] | None = None,
    peer_grace: float = PEER_GRACE,
    signal_grace: float = SIGNAL_GRACE,
) -> int:
    """Starts the workers, again after a crash, until they are done; returns the exit code.

    No process of the cluster is left when this returns, nor when it is killed.

    Args:
        command: what each worker runs
        folder: the run folder, for the logs
        workers: how many
        max_restarts: how often all are started again after a crash, in total
        gpus: each worker's ``CUDA_VISIBLE_DEVICES``; None leaves it as it is
        peer_grace: see ``PEER_GRACE``
        signal_grace: see ``SIGNAL_GRACE``

    Raises:
        SetupError: a worker cannot be started, or another process is training the run.
    """
    if is_locked(folder / "train.log"):
        raise refuse_second(folder)
    with _count_signals() as signals:
        for restarts in range(max_restarts + 1):
            with start_workers(command, folder, workers, gpus, restarts) as started:
                ends = _watch(started, signals, peer_grace, signal_grace)
            if signals.ended_at is not None:
                return INTERRUPTED
            verdict, index = judge(ends)
            end, log = _describe_end(index, ends[index]), _log(folder, index)
            if verdict == "failed":
                if index:  # the chief has shown its own
                    said = _find_error(started[index], log)
                    _print(2, f"error: {f'worker {index}: {said}' if said else end} ({log})")
                return ends[index]
            if signals.numbers:
                stopped = 128 + signals.numbers[0]
                if verdict == "crashed" and ends[index] not in (-signal.SIGINT, -signal.SIGTERM):
                    _say(folder, f"warning: {end} ({log}) while it was to stop; not restarted")
                return ends[0] if ends.get(0) in ORDERLY else stopped
            if verdict == "done":
                return ends[index]
            if restarts < max_restarts:
                again = f"restarting from the last checkpoint ({restarts + 1} of {max_restarts})"
                _say(folder, f"warning: {end} ({log}); {again}")
    _print(2, f"error: {end} ({log}), and max_restarts is {max_restarts}; giving up.")
    return 1


def judge(ends: Mapping[int, int]) -> tuple[Literal["done", "failed", "crashed"], int]:
    """Says what became of a cluster, and which worker decides it.

    Args:
        ends: the exit codes of the workers, in the order in which they ended, negative for the
            signal that killed one; those that the supervisor killed are left out

    Returns:
        ``done``, with the chief if it is among them; ``failed``, of hooks, settings or files, which
        starting again would repeat; or ``crashed``, with what looks most like the cause.
    """
    if failed := [index for index in sorted(ends) if ends[index] in (1, 2)]:
        return "failed", failed[0]
    # TensorFlow answers the loss of a peer by PeerLost, or by aborting.
    consequences = {-signal.SIGABRT: 1, PeerLost.exit_code: 2}
    if crashed := [index for index, code in ends.items() if code not in ORDERLY]:
        return "crashed", min(crashed, key=lambda index: consequences.get(ends[index], 0))
    return "done", min(ends)


def _describe_end(index: int, code: int) -> str:
    if code == PeerLost.exit_code:
        return f"worker {index} lost another worker"
    if code >= 0:
        return f"worker {index} ended with exit code {code}"
    known = -code in signal.valid_signals()
    name = signal.Signals(-code).name if known else f"signal {-code}"
    return f"worker {index} was killed by {name}"


def free_ports(count: int) -> list[int]:
    """Returns different ports of the loopback device that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def _count_signals() -> Iterator[Counted]:
    """Notes SIGINT and SIGTERM instead of dying of them."""
    signals = Counted()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, _: signals.note(number)) for each in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@dataclasses.dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    log_start: int
    signals: int = 0
    killed: bool = False


@contextlib.contextmanager
def start_workers(
    command: Sequence[str], folder: Path, count: int, gpus: Sequence[str] | None, restarts: int
) -> Iterator[list[_Worker]]:
    """Yields the processes of one start of the cluster, none of which outlives it."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    title = f"start {restarts + 1}"
    started: list[_Worker] = []
    pipe, ours = os.pipe()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            task = {"type": "worker", "index": index}
            environ = {
                **os.environ,
                "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
                PIPE: str(pipe),
                # What was printed before a crash is to be in the log.
                "PYTHONUNBUFFERED": "1",
                # So that all go through a set of texts, such as class names, in one order.
                "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            }
            if gpus is not None:
                environ["CUDA_VISIBLE_DEVICES"] = gpus[index]
            with _log(folder, index).open("ab", buffering=0) as log:
                start = os.fstat(log.fileno()).st_size
                log.write(f"--- {time.strftime('%F %T')} worker {index}, {title} ---\n".encode())
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log if index else None,
                    stderr=log if index else None,
                    env=environ,
                    pass_fds=(pipe,),
                    start_new_session=True,
                )
            started.append(_Worker(process, start))
        yield started
    except OSError as error:
        raise SetupError(f"workers: one cannot be started: {reason(error)}") from error
    finally:
        for worker in started:
            if worker.process.poll() is None:
                _kill_group(worker.process)
                worker.process.wait()
        os.close(pipe)
        os.close(ours)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a worker and what it has started, as far as that stayed in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _watch(
    started: Sequence[_Worker], signals: Counted, peer_grace: float, signal_grace: float
) -> dict[int, int]:
    """Waits until every worker has ended; returns the exit codes, of those killed here none."""
    ends: dict[int, int] = {}
    running, deadline = dict(enumerate(started)), float("inf")
    while running:
        if signals.ended_at is not None:
            deadline = min(deadline, signals.ended_at + signal_grace)
        for index, worker in list(running.items()):
            if (code := worker.process.poll()) is not None:
                del running[index]
                _kill_group(worker.process)  # what it has started itself
                if not worker.killed:
                    ends[index] = code
                    if code not in ORDERLY:  # the others wait for it in vain
                        deadline = min(deadline, time.monotonic() + peer_grace)
                continue
            for number in signals.numbers[worker.signals :]:
                worker.process.send_signal(number)
                worker.signals += 1
            if time.monotonic() > deadline:
                worker.killed = True
                _kill_group(worker.process)
        time.sleep(TICK)
    return ends


def _find_error(worker: _Worker, log: Path) -> str:
    """Returns the last error that a worker has written since this start; empty if none."""
    text = log.read_bytes()[worker.log_start :].decode(errors="replace")
    said = [line for line in text.splitlines() if line.startswith("error: ")]
    return said[-1].removeprefix("error: ") if said else ""


def _log(folder: Path, worker: int) -> Path:
    """Where a worker's log is; the chief's is that of the run, which it writes itself."""
    return folder / (f"worker-{worker}.log" if worker else "train.log")


def _say(folder: Path, text: str) -> None:
    """Prints a line for the user, and into the run's log."""
    with contextlib.suppress(OSError), _log(folder, 0).open("ab") as log:
        log.write(f"--- {time.strftime('%F %T')} {text} ---\n".encode())
    if not is_stdout(_log(folder, 0)):
        _print(1, text)


def _print(descriptor: int, text: str) -> None:
    """Writes a line to the console; one that is gone is no reason to end otherwise."""
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{text}\n".encode())
