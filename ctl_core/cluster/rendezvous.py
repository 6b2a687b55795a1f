"""The processes of a cluster wait here for each other, before TensorFlow makes them one.

TensorFlow's own wait hears neither Ctrl-C nor SIGTERM, and names nobody. So each process listens on
its port, which TensorFlow has after it, and goes on when those of all others have answered once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from ctl_core.cluster.task import Task
from ctl_core.errors import PeerLost, one_line

# After which a process says whom it is waiting for, and after which it ends (seconds).
PATIENCE, LONGEST = 10.0, 600.0


def wait_for_others(task: Task, say: Callable[[str], None]) -> None:
    """Waits until every other process of the cluster has listened on its address.

    Args:
        task: this process's place
        say: is told, once, which addresses do not answer

    Raises:
        PeerLost: others have not come after ``LONGEST``, or this process's port is taken.
    """
    begun, told = time.monotonic(), False
    with _listen(task.addresses[task.index]):
        missing = [index for index in range(task.processes) if index != task.index]
        while missing := [i for i in missing if not _answers(task.addresses[i])]:
            names = ", ".join(map(task.shown, missing[:8])) + ", ..." * (len(missing) > 8)
            waited = time.monotonic() - begun
            if waited > LONGEST:
                raise PeerLost(
                    f"cluster: no answer after {waited:.0f} s from {names}; started again, all of "
                    "them, the run goes on from its last checkpoint."
                )
            if waited > PATIENCE and not told:
                told = True
                say(f"waiting for the other processes of the cluster: no answer from {names}")
            time.sleep(0.1)


def _listen(address: str) -> socket.socket:
    """Listens on the port of an address, on every interface, as TensorFlow will."""
    port = int(address.rpartition(":")[2])
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        why = error.strerror or one_line(error)
        raise PeerLost(
            f"{address}: this process cannot join its cluster: {why}; perhaps a process of an "
            "earlier start still has the port."
        ) from error


def _answers(address: str) -> bool:
    """Whether a process listens there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as connection:
            # A port of this machine that nobody listens on may be given to the connection itself.
            return bool(connection.getsockname() != connection.getpeername())
    except OSError:  # nobody there yet, or the name is not known yet
        return False
