"""The processes of a cluster wait here for each other, before TensorFlow makes them one.

TensorFlow's own wait at the start of a cluster has no end on process 0, hears neither Ctrl-C nor
SIGTERM, and names nobody. So they meet before: process 0 listens on the port that TensorFlow has
after it, each other process tells it its number, and when all are there, all go on at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterable

from ctl_core.cluster.task import Task
from ctl_core.errors import PeerLost, SetupError, one_line

# After which a process says that it is waiting for others (seconds), and how often it looks.
PATIENCE = 10.0
_TICK = 0.1
# How often process 0 tells those that wait who is missing; after a few it counts as gone (seconds).
_NEWS = 1.0
_SILENCE = 10.0
_HELLO = "ctl_core"


def meet(task: Task, seconds: float, say: Callable[[str], None]) -> None:
    """Waits until all processes of the cluster are there.

    Args:
        task: this process's place
        seconds: the longest wait
        say: is told, once, that this process is waiting, and for whom

    Raises:
        PeerLost: others have not come in that time, or this process's port is taken.
        SetupError: processes have been told of different clusters.
    """
    wait = _Wait(task, seconds, say)
    try:
        with _listening(task) as listener:
            if task.chief:
                _gather(task, listener, wait)
            else:
                _attend(task, wait)
    except OSError as error:
        why = error.strerror or one_line(error)
        if error.errno is not None and "in use" in why:
            why = "its port is taken, perhaps by a process of an earlier start"
        own = task.addresses[task.index]
        raise PeerLost(f"{own}: this process cannot join its cluster: {why}.") from error


class _Wait:
    """How long this process has waited, and what was said of it."""

    def __init__(self, task: Task, seconds: float, say: Callable[[str], None]) -> None:
        self._task, self._seconds, self._say = task, seconds, say
        self._begun = time.monotonic()
        self._said = False

    def tick(self, missing: Iterable[int]) -> None:
        """Says that this process is waiting, when it is time; and ends the wait."""
        waited = time.monotonic() - self._begun
        if waited > self._seconds:
            raise PeerLost(
                f"wait_for_workers: after {self._seconds:g} s, not there: {self._names(missing)}; "
                "started again, all of them, the run goes on from its last checkpoint."
            )
        if waited > PATIENCE and not self._said:
            self._said = True
            self._say(f"waiting for the other processes of the cluster: {self._names(missing)}")

    def _names(self, missing: Iterable[int]) -> str:
        names = [self._task.shown(index) for index in sorted(missing)]
        return ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)


def _listening(task: Task) -> socket.socket:
    """Listens on this process's port, on every interface, as TensorFlow will."""
    port = int(task.addresses[task.index].rpartition(":")[2])
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", port), backlog=1024)


def _hello(task: Task) -> bytes:
    """What a process says of itself: its number, and of which cluster."""
    return f"{_HELLO} {_cluster_of(task)} {task.index}\n".encode()


def _cluster_of(task: Task) -> str:
    return hashlib.sha256(json.dumps(task.addresses).encode()).hexdigest()[:16]


class _Lines:
    """A connection, as lines of text; nothing here waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self._text, self.closed = connection, b"", False

    def read(self) -> str | None:
        """Returns the last whole line that has come, if one has."""
        try:
            while not self.closed and len(self._text) < 1 << 20:
                more = self.connection.recv(4096)
                self._text, self.closed = self._text + more, not more
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        whole, end, self._text = self._text.rpartition(b"\n")
        return (whole + end).decode(errors="replace").splitlines()[-1] if end else None

    def write(self, text: str) -> None:
        """Sends a line; one that cannot be sent closes the connection."""
        try:
            self.connection.sendall(f"{text}\n".encode())
        except OSError:
            self.closed = True


def _gather(task: Task, listener: socket.socket, wait: _Wait) -> None:
    """On process 0: waits for all others, and lets them go on."""
    listener.setblocking(False)
    cluster, told = _cluster_of(task), 0.0
    there: dict[int, _Lines] = {}
    new: list[_Lines] = []
    with contextlib.ExitStack() as stack:
        while True:
            with contextlib.suppress(BlockingIOError):
                while True:
                    new.append(_Lines(stack.enter_context(listener.accept()[0])))
            for lines in list(new):
                words = (lines.read() or "").split()
                if len(words) == 3 and words[0] == _HELLO and words[2].isdecimal():
                    new.remove(lines)
                    if words[1] != cluster:
                        lines.write("other")
                    elif 0 < int(words[2]) < task.processes:
                        there[int(words[2])] = lines
                elif lines.closed:  # somebody who looked whether the port is open
                    new.remove(lines)
            for index, lines in list(there.items()):
                lines.read()
                if lines.closed:  # it has ended meanwhile
                    del there[index]
            missing = {*range(1, task.processes)} - there.keys()
            if not missing:
                for lines in there.values():
                    lines.write("go")
                return
            if time.monotonic() - told > _NEWS:
                told = time.monotonic()
                for lines in there.values():
                    lines.write(json.dumps(sorted(missing)))
            wait.tick(missing)
            time.sleep(_TICK)


def _attend(task: Task, wait: _Wait) -> None:
    """On the others: tells process 0 of this one until it lets all go on."""
    host, _, port = task.addresses[0].rpartition(":")
    while True:
        # An error: process 0 is not there yet, or its name is not known yet.
        with contextlib.suppress(OSError), _connected(host.strip("[]"), int(port)) as connection:
            connection.sendall(_hello(task))
            if _wait_with(_Lines(connection), wait):
                return
        wait.tick([0])
        time.sleep(_TICK)


def _connected(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=2.0)


def _wait_with(lines: _Lines, wait: _Wait) -> bool:
    """Waits for process 0's word; False if it has ended meanwhile, or is none of ours."""
    heard, missing = time.monotonic(), [0]
    while not lines.closed and time.monotonic() - heard < _SILENCE:
        word = lines.read()
        if word == "go":
            return True
        if word == "other":
            raise SetupError(
                "cluster: process 0 was told of another cluster than this process; give all of "
                "them the same list of addresses."
            )
        if word is not None and word.startswith("["):
            with contextlib.suppress(ValueError):
                heard, missing = time.monotonic(), [int(each) for each in json.loads(word)]
        wait.tick(missing)
        time.sleep(_TICK)
    return False
