"""Where this process runs: alone, or in a cluster of which whatever started it has told.

Each place is read from environment variables, and nothing else is asked: ``TF_CONFIG`` (also in the
shape of Vertex AI), a step of Slurm, an Indexed Job of Kubernetes, SkyPilot.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping

from ctl_core.cluster.slurm import ALONE, read_slurm
from ctl_core.cluster.task import PIPE, Place, Task
from ctl_core.cluster.tf_config import read_tf_config
from ctl_core.errors import SetupError, one_line
from ctl_core.settings import Config

# Where each process has a machine, or a pod, of its own: the port of TensorFlow's examples.
PORT = 2222
_TPUS = ("TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")


def find_place(config: Config, environ: Mapping[str, str] = os.environ) -> Place:
    """Reads this process's place, as ``cluster`` of the settings says where to look.

    With ``auto``, ``TF_CONFIG`` goes before all others. Others that agree are taken as one.

    Raises:
        SetupError: what is there cannot be read, or contradicts itself; or what the setting names
            is not there.
    """
    if PIPE in environ:  # a worker of --workers, whatever the supervisor was in
        return read_tf_config(environ) or Place()
    if config.cluster == "none" or config.strategy in ("one_device", "mirrored"):
        return Place()
    if config.cluster != "auto":
        read, needs = READERS[config.cluster]
        if place := read(environ):
            return place
        raise SetupError(
            f"cluster: {config.cluster} needs {needs}, and that is not in the environment of this "
            "process; leave the setting out to take what there is."
        )
    _refuse_tpus(environ)
    if told := read_tf_config(environ):
        return dataclasses.replace(told, note=_others_than(told, environ))
    places = [place for read, _ in READERS.values() if (place := read(environ))]
    several = [place for place in places if place.task.processes > 1]
    if len({(place.task.processes, place.task.index) for place in several}) > 1:
        words = " and ".join(
            f"{each.name} says {each.task.index} of {each.task.processes}" for each in several
        )
        raise SetupError(
            f"cluster: which process is this? {words}; choose with --cluster "
            f"{' or '.join(each.kind for each in several)}."
        )
    return (several or places or [Place()])[0]


def is_placed(config: Config, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether something has told this process to join a cluster, if only unreadably."""
    try:
        return find_place(config, environ).in_cluster
    except SetupError:
        return True


def read_task(config: Config, environ: Mapping[str, str] = os.environ) -> Task:
    """Reads this process's place in the cluster of a training; alone, it is the chief of one.

    Raises:
        SetupError: ``find_place`` refuses; this process is to evaluate; or the settings do not fit.
    """
    place = find_place(config, environ)
    if place.evaluates:
        raise SetupError(
            f"{place.name}: this process has the type 'evaluator', which trains nothing; the "
            "command line runs evaluate --watch in its place."
        )
    if config.strategy == "multi_worker" and place.kind == "none":
        raise SetupError(
            "strategy: multi_worker needs TF_CONFIG in the environment of each process, or a "
            "place that --cluster knows; on one machine, --workers K starts them."
        )
    task = place.task
    if task.processes > 1 and config.run_name is None:
        raise SetupError("run_name: a cluster needs one, the same for each of its processes.")
    return task


def _others_than(told: Place, environ: Mapping[str, str]) -> str:
    """Says which places are left alone, since another one is taken."""
    left = []
    for kind, (read, _) in READERS.items():
        try:
            place = read(environ) if kind != "tf_config" else None
        except SetupError:  # of no account here
            continue
        if place and place.task.processes > 1 and place.task.addresses != told.task.addresses:
            left.append(f"{place.name} of {place.task.processes} processes")
    return f"cluster: {told.name} is taken; {' and '.join(left)} is left alone." if left else ""


def _refuse_tpus(environ: Mapping[str, str]) -> None:
    if found := [name for name in _TPUS if environ.get(name)]:
        raise SetupError(
            f"{found[0]}: this is a machine with TPUs, which are not supported: training is on "
            "GPUs and CPUs; --cluster none trains on the CPU here."
        )


def read_kubernetes(environ: Mapping[str, str]) -> Place | None:
    """Reads the place in an Indexed Job; None outside of one, and in one that gives no size.

    Kubernetes sets ``JOB_COMPLETION_INDEX``, and HOSTNAME to the job's name and that index. The
    manifest sets ``JOB_SIZE`` to the job's completions; an Indexed Job without it is many processes
    of their own, a sweep say. ``JOB_SERVICE`` is the headless service; default: the job's name.

    Raises:
        SetupError: a variable cannot be read, or does not fit the others.
    """
    size, index = environ.get("JOB_SIZE", ""), environ.get("JOB_COMPLETION_INDEX", "")
    if not size or not index:
        return None
    processes, number = _number("JOB_SIZE", size), _number("JOB_COMPLETION_INDEX", index)
    if not number < processes:
        raise SetupError(
            f"JOB_COMPLETION_INDEX: {number}, but JOB_SIZE is {processes}; give JOB_SIZE the value "
            "of completions in the manifest."
        )
    host = environ.get("HOSTNAME") or socket.gethostname()
    job = host.removesuffix(f"-{number}")
    if job == host:
        raise SetupError(
            f"HOSTNAME: expected the name of an Indexed Job's pod, which ends in -{number}, got "
            f"{one_line(host, 80)}; set TF_CONFIG instead; {ALONE}"
        )
    service = environ.get("JOB_SERVICE") or job
    addresses = tuple(f"{job}-{each}.{service}:{PORT}" for each in range(processes))
    return Place("kubernetes", f"Kubernetes job {job}", Task(processes, number, addresses))


def read_skypilot(environ: Mapping[str, str]) -> Place | None:
    """Reads the place that SkyPilot gives: a process a node; None without SkyPilot.

    Raises:
        SetupError: a variable cannot be read, or does not fit the others.
    """
    ips = environ.get("SKYPILOT_NODE_IPS", "").split()
    if not ips:
        return None
    for ip in ips:
        try:
            ipaddress.ip_address(ip)
        except ValueError:
            raise SetupError(
                f"SKYPILOT_NODE_IPS: expected an IP address a line, got {one_line(ip, 80)}; {ALONE}"
            ) from None
    rank = _number("SKYPILOT_NODE_RANK", environ.get("SKYPILOT_NODE_RANK", ""))
    if rank >= len(ips):
        raise SetupError(
            f"SKYPILOT_NODE_RANK: {rank}, but SKYPILOT_NODE_IPS has {len(ips)} nodes, counted from "
            f"0; {ALONE}"
        )
    addresses = tuple(f"[{ip}]:{PORT}" if ":" in ip else f"{ip}:{PORT}" for ip in ips)
    return Place("skypilot", "SkyPilot", Task(len(ips), rank, addresses))


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text.strip(), re.ASCII):
        got = one_line(text, 80) or "nothing"
        raise SetupError(f"{name}: expected a whole number, got {got}; {ALONE}")
    return int(text)


# By the setting's values: what reads the place, and what has to be there.
READERS: dict[str, tuple[Callable[[Mapping[str, str]], Place | None], str]] = {
    "tf_config": (read_tf_config, "TF_CONFIG"),
    "slurm": (read_slurm, "a step of Slurm (SLURM_STEP_ID), as srun starts it"),
    "kubernetes": (
        read_kubernetes,
        "JOB_COMPLETION_INDEX, which an Indexed Job has, and JOB_SIZE, which its manifest sets",
    ),
    "skypilot": (read_skypilot, "SKYPILOT_NODE_IPS"),
}
