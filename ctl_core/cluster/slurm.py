"""The place that Slurm gives a process: a step of several tasks, which srun starts, is a cluster.

The shell of ``salloc`` or ``sbatch``, which srun has not started, and a step of one task are none.
Lists of hosts are expanded here: containers often have no ``scontrol``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ctl_core.cluster.gpus import visible_gpus
from ctl_core.cluster.task import Place, Task
from ctl_core.errors import SetupError, one_line

ALONE = "--cluster none trains in this process alone."
# Ports from here on are Slurm's jobs': below those that systems give to outgoing connections.
_FIRST_PORT, _PORTS = 10_000, 20_000
# So many hosts is more than any list that is meant.
_MOST = 1 << 16


def read_slurm(environ: Mapping[str, str]) -> Place | None:
    """Reads this process's place in a Slurm step; None outside of a step that ``srun`` started.

    Process i is task i of the step. Its port follows from the job, the step and i, so that no job
    meets another one on a node that they share.

    Raises:
        SetupError: a variable cannot be read, or they contradict each other.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PTY_PORT" in environ:  # the latter: srun --pty
        return None
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        raise SetupError(
            "SLURM_HET_SIZE: a heterogeneous job has several groups of nodes, which are not read "
            f"here; take one group, or set TF_CONFIG for each process; {ALONE}"
        )
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    name = f"Slurm step {job}.{step}"
    count, index = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_PROCID")
    if count == 1:
        return Place("slurm", name)
    nodes = _read(environ, "SLURM_STEP_NODELIST", expand_hosts)
    tasks = _read(environ, "SLURM_STEP_TASKS_PER_NODE", expand_counts)
    if len(nodes) != len(tasks) or sum(tasks) != count or index >= count:
        raise SetupError(
            f"SLURM_STEP_NUM_TASKS: {count} tasks, of which this is SLURM_PROCID {index}, do not "
            f"fit {len(nodes)} nodes (SLURM_STEP_NODELIST) with {one_line(tasks, 60)} tasks "
            f"(SLURM_STEP_TASKS_PER_NODE); start them with srun; {ALONE}"
        )
    hosts = [node for node, number in zip(nodes, tasks, strict=True) for _ in range(number)]
    node = _number(environ, "SLURM_NODEID")
    if node >= len(nodes) or hosts[index] != nodes[node]:
        raise SetupError(
            f"SLURM_NODEID: task {index} is on node {node}, where tasks in order of the nodes "
            f"would have it on {hosts[index]}; start them with srun --distribution=block; {ALONE}"
        )
    # A prime number of ports between two jobs, for their numbers follow one another.
    base = _FIRST_PORT + (job * 97 + step * 13) % _PORTS
    addresses = tuple(f"{host}:{base + number}" for number, host in enumerate(hosts))
    gpus = _share_gpus(environ, tasks[node])
    return Place("slurm", name, Task(count, index, addresses), gpus, one_console=True)


def _share_gpus(environ: Mapping[str, str], tasks: int) -> str | None:
    """Returns this task's part of GPUs that all tasks of its node see; None if it has its own.

    Slurm binds GPUs to tasks by ``--gpus-per-task``; by ``--gpus-per-node`` all tasks see all.
    """
    if tasks == 1 or ("SLURM_GPUS_ON_NODE" not in environ and "CUDA_VISIBLE_DEVICES" in environ):
        return None  # chosen by the user, task by task perhaps
    gpus = visible_gpus(environ)
    if not gpus:
        return None
    if "SLURM_GPUS_ON_NODE" in environ and len(gpus) < _number(environ, "SLURM_GPUS_ON_NODE"):
        return None
    each, left = divmod(len(gpus), tasks)
    if left:
        raise SetupError(
            f"SLURM_GPUS_ON_NODE: {tasks} tasks on this node cannot share {len(gpus)} "
            f"GPU{'s' * (len(gpus) > 1)} evenly; ask for as many with --gpus-per-task, or for a "
            "number of tasks per node that divides them."
        )
    local = _number(environ, "SLURM_LOCALID")
    return ",".join(gpus[local * each : (local + 1) * each])


def _number(environ: Mapping[str, str], name: str) -> int:
    return int(_read(environ, name, _digits))


def _digits(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ValueError("expected a whole number")
    return int(text)


def _read(environ: Mapping[str, str], name: str, read):  # type: ignore[no-untyped-def]
    """Reads a variable, or says in one line which one it is that cannot be read."""
    text = environ.get(name, "").strip()
    try:
        return read(text)
    except ValueError as error:
        raise SetupError(
            f"{name}: {error}, as srun sets it, got {one_line(text, 80) or 'nothing'}; {ALONE}"
        ) from None


def expand_counts(text: str) -> list[int]:
    """Returns ``[2, 2, 2, 1]`` for ``2(x3),1``.

    Raises:
        ValueError: the text is of another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:\(x(\d{1,5})\))?", part.strip(), re.ASCII)
        if match is None or len(counts) + int(match[2] or 1) > _MOST:
            raise ValueError("expected numbers of tasks such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a list of Slurm's, in order.

    It is of a form such as ``node[9-10,12],rack[1-2]node[3-4]``.

    Raises:
        ValueError: the text is of another form.
    """
    wrong = ValueError("expected a list of hosts such as node[9-10,12]")
    if not re.fullmatch(
        r"[^][,\s]*(\[[^][\s]+\][^][,\s]*)*(,[^][,\s]*(\[[^][\s]+\][^][,\s]*)*)*", text
    ):
        raise wrong
    hosts: list[str] = []
    for part in re.findall(r"(?:[^][,]|\[[^]]*\])+", text):
        found = [""]
        for word in re.findall(r"\[[^]]*\]|[^][]+", part):
            pieces = _range(word[1:-1]) if word.startswith("[") else [word]
            if pieces is None or len(hosts) + len(found) * len(pieces) > _MOST:
                raise wrong
            found = [before + piece for before in found for piece in pieces]
        hosts += found
    if not hosts:
        raise wrong
    return hosts


def _range(text: str) -> Sequence[str] | None:
    """Returns ``["09", "10", "12"]`` for ``09-10,12``: numbers keep their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part, re.ASCII)
        if match is None:
            return None
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + _MOST:
            return None
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
