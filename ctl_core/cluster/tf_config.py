"""The place in a cluster that ``TF_CONFIG`` gives, or Vertex AI's ``CLUSTER_SPEC``.

The form of the one is TensorFlow's: ``{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task":
{"type": "worker", "index": 0}}``; with a "chief" in the cluster, that is process 0. The other has
pools of machines: pool 0 is the chief, 1 the workers, 2 parameter servers, 3 evaluators.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ctl_core.cluster.task import Place, Task
from ctl_core.errors import SetupError, one_line

_POOLS = {
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}
_NO_SERVERS = "there are no parameter servers here: each worker has the weights, and gradients are "
_NO_SERVERS += "summed among the workers; leave the ps out."


def read_tf_config(environ: Mapping[str, str]) -> Place | None:
    """Reads this process's place; None if neither variable says one.

    Raises:
        SetupError: what is there cannot be read, or is of a cluster that does not train here.
    """
    name, text = "TF_CONFIG", environ.get("TF_CONFIG", "").strip()
    if not text:
        name, text = "CLUSTER_SPEC", environ.get("CLUSTER_SPEC", "").strip()
        if "workerpool" not in text:  # none, or somebody else's
            return None
    jobs, job, index = _parse(name, text)
    _check_jobs(name, jobs, job)
    if job == "evaluator":  # which the list of the cluster may leave out
        return Place("tf_config", name, evaluates=True)
    own = jobs.get(job, ())
    if not 0 <= index < len(own):
        raise SetupError(
            f"{name}: this process is {job} {index}, but the cluster has {len(own)} of that type, "
            f"counted from 0: {', '.join(own) or 'none'}; correct the index or the list."
        )
    chiefs = jobs.get("chief", ())
    addresses = chiefs + jobs.get("worker", ())
    _check_addresses(name, addresses)
    task = Task(len(addresses), index if job == "chief" else len(chiefs) + index, addresses)
    return Place("tf_config", name, task)


def _parse(name: str, text: str) -> tuple[dict[str, tuple[str, ...]], str, int]:
    """Returns the addresses of each job, and which of them this process is."""
    try:
        content = json.loads(text)
        found = {_POOLS.get(job, job): hosts for job, hosts in content["cluster"].items()}
        job, index = content["task"]["type"], int(str(content["task"]["index"]))
        lists = all(isinstance(hosts, list) for hosts in found.values())
        if not lists or not all(
            isinstance(host, str) for hosts in found.values() for host in hosts
        ):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SetupError(
            f'{name}: expected {{"cluster": {{"worker": ["host:port", ...]}}, "task": {{"type": '
            f'"worker", "index": 0}}}}, or no {name} to train in one process, got '
            f"{one_line(text, 200)}"
        ) from None
    jobs = {job: tuple(hosts) for job, hosts in found.items()}
    return jobs, _POOLS.get(job, job) if isinstance(job, str) else job, index


def _check_jobs(name: str, jobs: Mapping[str, tuple[str, ...]], own: object) -> None:
    known = "expected 'worker', and at most one 'chief', which was called 'master' once"
    for job in jobs:
        if jobs[job] and job not in ("chief", "worker", "evaluator"):
            why = _NO_SERVERS if job == "ps" else "every process trains here."
            raise SetupError(f"{name}: the cluster has the job {job!r}, {known}; {why}")
    if own not in ("chief", "worker", "evaluator"):
        why = _NO_SERVERS if own == "ps" else "every process trains here, or evaluates."
        raise SetupError(f"{name}: this process has the type {own!r}, {known}; {why}")
    chiefs = jobs.get("chief", ())
    if len(chiefs) > 1:
        raise SetupError(
            f"{name}: the cluster has {len(chiefs)} addresses of a chief, {', '.join(chiefs)}; "
            "expected one; the others are workers."
        )


def _check_addresses(name: str, addresses: tuple[str, ...]) -> None:
    for address in addresses if len(addresses) > 1 else ():
        if addresses.count(address) > 1:
            raise SetupError(
                f"{name}: {address!r} is the address of {addresses.count(address)} processes; "
                "each needs one of its own."
            )
        if not re.search(r":\d+$", address):
            raise SetupError(f"{name}: expected addresses as host:port, got {address!r}.")
