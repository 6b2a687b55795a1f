"""Which process of a cluster this one is, by ``TF_CONFIG``; and the wait for the others.

The supervisor of ``--workers`` writes it for its workers; elsewhere the files of launch/ do, or the
cluster itself. The form is TensorFlow's: ``{"cluster": {"worker": ["host1:2222", "host2:2222"]},
"task": {"type": "worker", "index": 0}}``; ``"shares_gpus": true`` is ours.
"""

import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Literal

from ctl_core.run.errors import PeerLost, SetupError, make_line
from ctl_core.run.settings import Config

# After which a process says whom it is waiting for, after which it ends once all have answered
# (their GPUs start meanwhile), and after which it ends before (seconds).
PATIENCE, JOIN, LONGEST = 10.0, 60.0, 600.0
# Whom an error of TensorFlow's names; those of heartbeats may not name process 0, where they go.
_LOST = re.compile(r"(?:timed out task names:|reported from|remote target)\s+/job:\S+/task:(\d+)")


@dataclasses.dataclass(frozen=True)
class Task:
    """This process's place in the cluster; alone, it is the chief of one.

    Attributes:
        processes, addresses: how many train together, and where: host:port
        index: this one's number, from 0; number 0 is the chief
        kind: what this process is for; only a worker is one of ``processes``
        shares_gpus: whether all of them are on this machine and share out its GPUs
    """

    processes: int = 1
    index: int = 0
    addresses: tuple[str, ...] = ()
    kind: Literal["worker", "evaluator", "ps"] = "worker"
    shares_gpus: bool = False

    @property
    def chief(self) -> bool:
        """Whether this process prints, writes summaries and keeps the checkpoints."""
        return self.index == 0

    def describe(self, index: int) -> str:
        """Names a process, such as ``process 1 at host2:2222``."""
        return f"process {index} at {self.addresses[index]}"


def read_task(config: Config, environ: Mapping[str, str] = os.environ) -> Task:
    """Reads what this process is.

    A chief, once called master, is process 0. With a strategy of one process, ``TF_CONFIG`` is left
    alone.

    Raises:
        SetupError: ``TF_CONFIG`` cannot be read, or the settings do not fit it.
    """
    task = Task() if config.strategy in ("one_device", "mirrored") else _parse(environ)
    if task == Task() and config.strategy == "multi_worker":
        raise SetupError(
            "strategy: multi_worker needs TF_CONFIG in the environment of each process; on one "
            "machine, --workers K starts them."
        )
    if (task.processes > 1 or task.kind == "evaluator") and config.run_name is None:
        raise SetupError("run_name: a cluster needs one, the same for each of its processes.")
    return task


def _parse(environ: Mapping[str, str]) -> Task:
    if not (text := environ.get("TF_CONFIG", "").strip()):
        return Task()
    try:
        content = json.loads(text.replace('"master"', '"chief"'))  # as Estimators called it
        job, index = content["task"]["type"], int(content["task"]["index"])
        if job in ("evaluator", "ps"):
            return Task(kind=job)
        jobs = {name: tuple(content["cluster"].get(name, ())) for name in ("chief", "worker")}
        addresses = jobs["chief"] + jobs["worker"]
        if index not in range(len(jobs[job])) or len({*addresses}) < len(addresses):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SetupError(
            'TF_CONFIG: expected {"cluster": {"worker": ["host:port", ...]}, "task": {"type": '
            '"worker", "index": 0}} with different addresses and an index into them, got '
            f"{make_line(text, 300)}"
        ) from None
    own, shares = addresses.index(jobs[job][index]), bool(content.get("shares_gpus"))
    return Task(len(addresses), own, addresses, shares_gpus=shares)


def describe_loss(task: Task, error: object) -> str:
    """Says which process does not answer this one, if an error tells, and what to do."""
    lost = next(iter(_LOST.findall(str(error))), "0" if "/Heartbeat" in str(error) else None)
    name = "another process of the cluster" if lost is None else task.describe(int(lost))
    return f"no answer from {name}; start all again: the run goes on from its last checkpoint."


def wait_for_others(task: Task) -> None:
    """Waits until every other process of the cluster has listened on its address.

    TensorFlow's own wait hears neither Ctrl-C nor SIGTERM, and names nobody.

    Raises:
        PeerLost: others have not come after ``LONGEST``, or this process's port is taken.
    """
    begun, told = time.monotonic(), False
    missing = [index for index in range(task.processes) if index != task.index]
    with _listen(task.addresses[task.index]):
        while missing := [i for i in missing if not _answers(task.addresses[i])]:
            names = ", ".join(map(task.describe, missing))
            waited = time.monotonic() - begun
            if waited > LONGEST:
                raise PeerLost(f"cluster: no answer after {waited:.0f} s from {names}.")
            if waited > PATIENCE and not told:
                told = True
                print(f"cluster: waiting; no answer from {names}", flush=True)
            time.sleep(0.1)


def _listen(address: str) -> socket.socket:
    """Listens on the port of an address, on every interface, as TensorFlow will."""
    port, dual = int(address.rpartition(":")[2]), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as error:  # of an earlier start, perhaps
        raise PeerLost(f"cluster: cannot listen on {address}: {error.strerror}.") from error


def _answers(address: str) -> bool:
    """Whether a process listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
        return True
    except OSError:  # nobody there yet, or the name is not known yet
        return False
