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
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # Windows, where ``start_cluster`` refuses
    fcntl = None  # type: ignore[assignment]

from ctl_core.cluster.gpus import share_gpus, visible_gpus
from ctl_core.cluster.signals import INTERRUPTED, Counted
from ctl_core.cluster.task import PIPE as PIPE
from ctl_core.cluster.task import is_in_cluster
from ctl_core.cluster.verdict import BY_SIGNAL, ORDERLY, End, judge
from ctl_core.errors import SetupError, one_line
from ctl_core.files import is_stdout, refuse_links
from ctl_core.run_lock import taken

if TYPE_CHECKING:
    from ctl_core.settings import Config

# Names the temporary folder in which the workers of ``train --check`` have the run.
CHECK_FOLDER = "SUPERVISOR_CHECK_FOLDER"
# How often the supervisor looks around (seconds).
TICK = 0.1
# After one worker failed, how long the others may take to end by themselves (seconds).
PEER_GRACE = 5.0
# The same after a second SIGINT (see cluster/signals.py), by which they end themselves sooner.
SIGNAL_GRACE = 1.6


def supervised() -> bool:
    """Whether this process is a worker that a supervisor has started."""
    return PIPE in os.environ


def chief() -> bool:
    """Whether this process is worker 0 of a supervisor, whose console it has."""
    return supervised() and '"index": 0}' in os.environ.get("TF_CONFIG", "")


def die_with_supervisor() -> None:
    """In a worker, starts a thread that ends it, and what it started, when its supervisor ends."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        pipe = int(os.environ[PIPE])
        # A number that was handed down to a process of the worker's own means nothing there.
        if stat.S_ISFIFO(os.fstat(pipe).st_mode):
            os.set_inheritable(pipe, False)
            threading.Thread(target=_wait_for_end, args=(pipe,), daemon=True).start()


def _wait_for_end(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def start_cluster(argv: Sequence[str], config: Config) -> int:
    """Trains in a cluster of ``config.workers`` processes; returns the exit code of the command.

    Args:
        argv: the command line, which the workers get as it is, with their number and the run's
            name, which config.yaml may have said
        config: the settings that it means; the run has a name

    Raises:
        SetupError: the cluster cannot be started here, or the run is being trained.
    """
    check_workers(config)
    workers, name, devices = config.workers, config.run_name, config.virtual_devices
    assert name is not None
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


def check_workers(config: Config) -> None:
    """Refuses workers that cannot be started here.

    Raises:
        SetupError: this is no place for them, or the batch cannot be shared out evenly.
    """
    if fcntl is None:
        raise SetupError("workers: a cluster on one machine needs Linux or macOS.")
    if is_in_cluster():
        raise SetupError(
            f"workers: {config.workers} are to be started here, but TF_CONFIG tells this process "
            "to join a cluster; leave out one of them."
        )


def check_cluster(argv: Sequence[str], config: Config) -> int:
    """The same for ``train --check``: in a temporary folder, and never started again."""
    with tempfile.TemporaryDirectory(prefix="ctl_core-check-", ignore_cleanup_errors=True) as path:
        os.environ[CHECK_FOLDER] = path
        try:
            return start_cluster(argv, dataclasses.replace(config, runs_dir=path, max_restarts=0))
        finally:
            del os.environ[CHECK_FOLDER]


def check_folder(config: Config) -> str | None:
    """Returns the temporary folder of ``check_cluster``, in one of its workers.

    Raises:
        SetupError: this process is in another cluster, which has none.
    """
    folder = os.environ.get(CHECK_FOLDER)
    if folder is None and is_in_cluster():
        raise SetupError(
            "check: the processes of TF_CONFIG have no temporary folder that all of them share; "
            "check without it, and with --workers 2 say."
        )
    return folder


def free_ports(count: int) -> list[int]:
    """Returns different ports of the loopback device that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


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
        SetupError: the logs cannot be written, a worker cannot be started, or another process
            is training the run.
    """
    _open_standard_streams()
    with _hold(folder, workers), _CountedSignals() as signals, _life_line() as pipe:
        for restarts in range(max_restarts + 1):
            if signals.numbers:  # between two starts
                return 128 + signals.numbers[0]
            with LocalWorkers(command, folder, workers, gpus, pipe, restarts) as cluster:
                ends = cluster.watch(signals, peer_grace, signal_grace)
            if signals.ended_at is not None:
                return INTERRUPTED
            verdict, end = judge(ends) if ends else ("crashed", End(0, -signal.SIGKILL))
            log = _log(folder, end.worker)
            if verdict == "failed":
                if end.worker:  # the chief has shown its own
                    _print_error(f"{cluster.error_of(end)} ({log})")
                return end.code
            if signals.numbers:
                code = _stopped_code(ends, signals.numbers[0])
                if verdict == "crashed" and end.code not in BY_SIGNAL:
                    cluster.say(f"warning: {end} ({log}) while it was to stop; not restarted")
                return code
            if verdict == "done":
                return end.code
            if restarts < max_restarts:
                cluster.say(
                    f"warning: {end} ({log}); restarting from the last checkpoint "
                    f"({restarts + 1} of {max_restarts})"
                )
        _print_error(f"{end} ({log}), and max_restarts is {max_restarts}; giving up.")
    return 1


def _stopped_code(ends: Sequence[End], received: int) -> int:
    """Returns the chief's exit code after a signal: 130 or 143, or 0 if it was done already."""
    for end in ends:
        if end.worker == 0 and end.code in ORDERLY:
            return end.code
        if end.worker == 0 and end.code in BY_SIGNAL:
            return 128 - end.code
    return 128 + received


class _CountedSignals(Counted):
    """Notes SIGINT and SIGTERM instead of dying of them."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, object] = {}

    def __enter__(self) -> _CountedSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, lambda n, _: self.note(n))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@dataclasses.dataclass
class _Worker:
    index: int
    process: subprocess.Popen[bytes]
    log_start: int
    signals: int = 0
    running: bool = True
    killed: bool = False


class LocalWorkers:
    """The processes of one start of the cluster, none of which outlives it."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        count: int,
        gpus: Sequence[str] | None,
        pipe: int,
        restarts: int,
    ) -> None:
        self._folder = folder
        self._workers: list[_Worker] = []
        try:
            addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
            for index in range(count):
                place = {
                    "cluster": {"worker": addresses},
                    "task": {"type": "worker", "index": index},
                }
                environ = {
                    **os.environ,
                    "TF_CONFIG": json.dumps(place),
                    PIPE: str(pipe),
                    # What was printed before a crash is to be in the log.
                    "PYTHONUNBUFFERED": "1",
                    # So that all go through a set of texts, such as class names, in one order.
                    "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
                }
                if gpus is not None:
                    environ["CUDA_VISIBLE_DEVICES"] = gpus[index]
                self._start(command, index, environ, pipe, f"start {restarts + 1}")
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                raise SetupError(f"a worker cannot be started: {one_line(error)}") from error
            raise

    def _start(
        self, command: Sequence[str], index: int, environ: dict[str, str], pipe: int, words: str
    ) -> None:
        with _log(self._folder, index).open("ab", buffering=0) as log:
            start = os.fstat(log.fileno()).st_size
            log.write(f"--- {time.strftime('%F %T')} worker {index}, {words} ---\n".encode())
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log if index else None,
                stderr=log if index else None,
                env=environ,
                pass_fds=(pipe,),
                start_new_session=True,
            )
        self._workers.append(_Worker(index, process, start))

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            if worker.running:
                _kill_group(worker.process)
                worker.process.wait()
        if self._workers and self._workers[0].process.returncode < 0 and os.isatty(1):
            _print(1, "\x1b[?25h")  # the chief could not end its live line, nor show the cursor

    def watch(self, signals: _CountedSignals, peer_grace: float, signal_grace: float) -> list[End]:
        """Waits until every worker has ended; returns how, those killed here left out."""
        ends: list[End] = []
        deadline = float("inf")
        while running := [worker for worker in self._workers if worker.running]:
            for worker in running:
                code = worker.process.poll()
                if code is None:
                    continue
                worker.running = False
                _kill_group(worker.process)  # what it has started itself
                if not worker.killed:
                    ends.append(End(worker.index, code))
                    if code not in ORDERLY:  # the others wait for it in vain
                        deadline = min(deadline, time.monotonic() + peer_grace)
            if signals.ended_at is not None:
                deadline = min(deadline, signals.ended_at + signal_grace)
            for worker in running:
                if worker.running and worker.signals < len(signals.numbers):
                    worker.process.send_signal(signals.numbers[worker.signals])
                    worker.signals += 1
                if worker.running and time.monotonic() > deadline:
                    worker.killed = True
                    _kill_group(worker.process)
            time.sleep(TICK)
        return ends

    def error_of(self, end: End) -> str:
        """Returns the last error line that a worker has written since this start."""
        with contextlib.suppress(OSError):
            with _log(self._folder, end.worker).open("rb") as log:
                start = self._workers[end.worker].log_start
                log.seek(max(start, os.fstat(log.fileno()).st_size - _LONGEST))
                text = log.read().decode(errors="replace")
            if lines := re.findall(r"^error: (.+)", text, re.MULTILINE):
                return f"worker {end.worker}: {lines[-1].rstrip()}"
        return str(end)

    def say(self, text: str) -> None:
        """Prints a line for the user, and into the run's log."""
        with contextlib.suppress(OSError), _log(self._folder, 0).open("ab") as log:
            log.write(f"--- {time.strftime('%F %T')} {text} ---\n".encode())
        if not is_stdout(_log(self._folder, 0)):
            _print(1, text)


def _log(folder: Path, worker: int) -> Path:
    """Where a worker's log is; the chief's is that of the run, which it writes itself."""
    return folder / (f"worker-{worker}.log" if worker else "train.log")


def _print_error(text: str) -> None:
    _print(2, f"error: {text}")


def _print(descriptor: int, text: str) -> None:
    """Writes a line to the console; one that is gone is no reason to end otherwise."""
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{text}\n".encode())


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a worker and what it has started, as far as that stayed in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


# How much of a log's end is searched for an error (bytes).
_LONGEST = 1 << 18


def _open_standard_streams() -> None:
    """Fills in standard streams that are closed, or else a pipe would get such a number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@contextlib.contextmanager
def _life_line() -> Iterator[int]:
    """Yields the read end of a pipe whose write end only this process has."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


@contextlib.contextmanager
def _hold(folder: Path, workers: int) -> Iterator[None]:
    """Makes the run folder and holds it against other supervisors, by worker 1's log.

    Whether the run is being trained without one is seen by its train.log (see ``Run.lock``),
    which is the chief's to hold.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder, [_log(folder, index) for index in range(workers)])
        log = _log(folder, 1).open("ab")
    except OSError as error:
        raise SetupError(
            f"{folder}: the run folder cannot be written ({error.filename}: {error.strerror}); "
            "choose another runs_dir or run_name."
        ) from error
    with log, contextlib.ExitStack() as stack:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                held = stack.enter_context(_log(folder, 0).open("rb"))
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken(folder) from None
        except OSError:  # a file system without locks: the chief warns of it
            pass
        stack.close()  # lets go of train.log
        yield
