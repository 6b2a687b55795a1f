"""Reads this process's place in a cluster from ``TF_CONFIG``, and waits for the other processes.

The supervisor of ``--workers`` sets ``TF_CONFIG`` for its workers. In other clusters, the files in
launch/ or the cluster itself set it. The format is defined by TensorFlow: ``{"cluster": {"worker":
["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}``. The engine adds only the
entry ``"shares_gpus": true``.
"""

import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Literal

from ctl_core.run.errors import PeerLost, SetupError, make_line
from ctl_core.run.settings import Config

# The time that a process waits for the others before it prints a message (seconds).
PATIENCE = 10.0
# The maximum time that a process waits for the others to start their GPUs, after all processes have
# answered (seconds).
JOIN_SECONDS = 60.0
# The maximum time that a process waits until all other processes have answered (seconds).
LONGEST = 600.0
# Matches the number of the lost process in an error of TensorFlow. Heartbeats are sent to process
# 0, and an error about them may not contain its number.
_LOST = re.compile(r"(?:timed out task names:|reported from|remote target)\s+/job:\S+/task:(\d+)")


@dataclasses.dataclass(frozen=True)
class Task:
    """This process's place in the cluster; a process without others is the chief.

    Attributes:
        processes: the number of processes that train together
        index: the number of this process, from 0; number 0 is the chief
        addresses: the address of each process, host:port
        kind: the job of this process; ``processes`` counts only workers
        shares_gpus: whether all processes are on this machine and share its GPUs
    """

    processes: int = 1
    index: int = 0
    addresses: tuple[str, ...] = ()
    kind: Literal["worker", "evaluator", "ps"] = "worker"
    shares_gpus: bool = False

    @property
    def chief(self) -> bool:
        """True if this process prints, writes summaries and keeps the checkpoints."""
        return self.index == 0

    def describe(self, index: int) -> str:
        """Returns a description of a process, such as ``process 1 at host2:2222``."""
        return f"process {index} at {self.addresses[index]}"


def count_cores() -> int:
    """Returns the number of cores that this process may use, as TensorFlow counts them."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_task(config: Config, environ: Mapping[str, str] = os.environ) -> Task:
    """Reads this process's place in the cluster.

    If the cluster has a chief (formerly called master), it is process 0. If the setting
    ``strategy`` uses only one process, ``TF_CONFIG`` is ignored.

    Raises:
        SetupError: ``TF_CONFIG`` cannot be read, or the settings do not fit it.
    """
    task = Task()
    if config.strategy not in ("one_device", "mirrored"):
        task = _parse(environ.get("TF_CONFIG", "").strip())
    if task == Task() and config.strategy == "multi_worker":
        raise SetupError(
            "strategy: multi_worker needs TF_CONFIG in the environment of each process; on "
            "one machine, --workers K starts K processes."
        )
    if (task.processes > 1 or task.kind == "evaluator") and config.run_name is None:
        raise SetupError("run_name: required in a cluster, and the same for all processes.")
    return task


def _parse(text: str) -> Task:
    """Parses the value of ``TF_CONFIG``; an empty string means that this process is alone."""
    if not text:
        return Task()
    try:
        content = json.loads(text.replace('"master"', '"chief"'))  # the old name of the chief
        job = content["task"]["type"]
        index_in_job = _read_index(content["task"]["index"])
        if job in ("evaluator", "ps"):
            return Task(kind=job)
        jobs = {name: tuple(content["cluster"].get(name, ())) for name in ("chief", "worker")}
        addresses = jobs["chief"] + jobs["worker"]
        if len(addresses) > 1:
            for address in addresses:
                _check_address(address)
        if index_in_job not in range(len(jobs[job])) or len({*addresses}) < len(addresses):
            raise ValueError
        index = addresses.index(jobs[job][index_in_job])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SetupError(
            'TF_CONFIG: expected {"cluster": {"worker": ["host:port", ...]}, "task": {"type": '
            '"worker", "index": 0}} with different addresses and an index into them, got '
            f"{make_line(text, 300)}"
        ) from None
    shares_gpus = bool(content.get("shares_gpus"))
    return Task(len(addresses), index, addresses, shares_gpus=shares_gpus)


def _read_index(value: int | str) -> int:
    """Returns the index of a process, which some launchers write as a string.

    Raises:
        ValueError: the value is not a whole number.
    """
    if isinstance(value, bool) or not re.fullmatch("[0-9]{1,9}", str(value)):
        raise ValueError
    return int(value)


def _check_address(address: str) -> None:
    """Checks the form of an address, host:port.

    Raises:
        ValueError: the port is missing or out of range, or the host cannot be a name.
        AttributeError: the address is not a string.
    """
    host, _, port = address.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise ValueError
    if not host or re.search(r"[\s/]", host) or len(host) > 253:
        raise ValueError
    host.encode("idna")  # raises a ValueError if a part of the name is empty or too long


def describe_loss(task: Task, error: BaseException | None) -> str:
    """Returns a message about a lost process, which says how to continue.

    The message names the process if the error contains its number.
    """
    text = str(error)
    lost = _LOST.search(text)
    if lost is not None:
        name = task.describe(int(lost[1]))
    elif "/Heartbeat" in text:
        name = task.describe(0)
    else:
        name = "another process of the cluster"
    return (
        f"no answer from {name}; restart all processes: the run resumes from its last checkpoint."
    )


def describe_exposure(task: Task) -> str:
    """Returns a line about the ports of a cluster, which TensorFlow cannot protect.

    TensorFlow's gRPC servers listen on all network interfaces. Anyone who can connect to a server
    can read and write files, and thereby run programs, with the rights of the process.
    """
    if task.shares_gpus:
        return "cluster: its ports have no password; train in trusted networks only (SECURITY.md)."
    return (
        "cluster: the ports of its processes have no password and no encryption; allow only "
        "these machines to reach them (SECURITY.md)."
    )


def wait_for_others(task: Task) -> None:
    """Waits until every other process of the cluster has listened on its address.

    TensorFlow would also wait, but it would ignore Ctrl-C and SIGTERM, and would not say which
    processes are missing.

    Raises:
        PeerLost: a process has not answered after ``LONGEST`` seconds, or this process's port is
            taken.
    """
    start = time.monotonic()
    is_reported = False
    missing = [index for index in range(task.processes) if index != task.index]
    with _listen(task.addresses[task.index]):
        while True:
            missing = [index for index in missing if not answers(task.addresses[index])]
            if not missing:
                return
            names = ", ".join(map(task.describe, missing))
            seconds = time.monotonic() - start
            if seconds > LONGEST:
                raise PeerLost(f"cluster: no answer from {names} within {seconds:.0f} s.")
            if seconds > PATIENCE and not is_reported:
                is_reported = True
                print(f"cluster: waiting; no answer from {names}", flush=True)
            time.sleep(0.1)


def are_others_there(task: Task) -> bool:
    """Returns True if every other process of the cluster still listens on its address."""
    others = [address for index, address in enumerate(task.addresses) if index != task.index]
    return all(map(answers, others))


def wait_for_chief(task: Task, measure: Callable[[], int]) -> None:
    """Waits until the chief listens on its address, which it does after it has fetched the run.

    Args:
        task: this process, which is not the chief
        measure: returns a number that changes while the chief fetches the run

    Raises:
        PeerLost: the chief has not answered, and the number has not changed, for ``LONGEST``
            seconds.
    """
    start = time.monotonic()
    last_change = start
    number = measure()
    is_reported = False
    while not answers(task.addresses[0]):
        now = time.monotonic()
        if measure() != number:
            number = measure()
            last_change = now
        if now - last_change > LONGEST:
            raise PeerLost(f"cluster: no answer from {task.describe(0)} within {LONGEST:.0f} s.")
        if now - start > PATIENCE and not is_reported:
            is_reported = True
            print(
                f"cluster: waiting for {task.describe(0)}, which is reading the mirror", flush=True
            )
        time.sleep(0.1)


def _listen(address: str) -> socket.socket:
    """Listens on the port of an address, on every network interface, as TensorFlow does later."""
    port = int(address.rpartition(":")[2])
    has_dual_stack = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if has_dual_stack else socket.AF_INET,
            backlog=1024,
            dualstack_ipv6=has_dual_stack,
        )
    except OSError as error:  # the port is still taken, perhaps by an earlier start
        raise PeerLost(f"cluster: cannot listen on {address}: {error.strerror}.") from error


def answers(address: str) -> bool:
    """Returns True if a process listens on an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
        return True
    except OSError:  # nobody listens yet, or the host name is not known yet
        return False
