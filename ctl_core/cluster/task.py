"""Which process of a cluster this one is, by ``TF_CONFIG`` in its environment.

Nothing else tells it. The supervisor of ``--workers`` writes it for its workers; elsewhere the
files of launch/ do, or the cluster itself. The form is TensorFlow's: ``{"cluster": {"worker":
["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Literal

from ctl_core.errors import SetupError, one_line
from ctl_core.settings import Config


@dataclasses.dataclass(frozen=True)
class Task:
    """This process's place in the cluster; alone, it is the chief of one.

    Attributes:
        processes: how many train together
        index: this one's number, from 0; number 0 is the chief
        addresses: of all processes, as host:port
        kind: what this process is for; only a worker is one of ``processes``
    """

    processes: int = 1
    index: int = 0
    addresses: tuple[str, ...] = ()
    kind: Literal["worker", "evaluator", "ps"] = "worker"

    @property
    def chief(self) -> bool:
        """Whether this process prints, writes summaries and keeps the checkpoints."""
        return self.index == 0

    def shown(self, index: int) -> str:
        """Names a process, such as ``process 1 at host2:2222``."""
        return f"process {index} at {self.addresses[index]}"


def read_task(config: Config, environ: Mapping[str, str] = os.environ) -> Task:
    """Reads what this process is.

    A chief, which was called master once, is process 0; the workers follow. With a strategy of one
    process, ``TF_CONFIG`` is left alone.

    Raises:
        SetupError: ``TF_CONFIG`` cannot be read, or the settings do not fit it.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if config.strategy in ("one_device", "mirrored"):
        text = ""
    if not text and config.strategy == "multi_worker":
        raise SetupError(
            "strategy: multi_worker needs TF_CONFIG in the environment of each process; on one "
            "machine, --workers K starts them."
        )
    task = _parse(text) if text else Task()
    if (task.processes > 1 or task.kind == "evaluator") and config.run_name is None:
        raise SetupError("run_name: a cluster needs one, the same for each of its processes.")
    return task


def is_in_cluster(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``TF_CONFIG`` tells this process of others."""
    text = environ.get("TF_CONFIG", "").strip()
    return bool(text) and _parse(text).processes > 1


def _parse(text: str) -> Task:
    try:
        content = json.loads(text)
        jobs = {_MASTER.get(job, job): hosts for job, hosts in content["cluster"].items()}
        job, index = content["task"]["type"], int(content["task"]["index"])
        if job in ("evaluator", "ps"):
            return Task(kind=job)
        parts = {name: tuple(jobs.get(name, ())) for name in ("chief", "worker")}
        own, addresses = parts[_MASTER.get(job, job)], parts["chief"] + parts["worker"]
        if index not in range(len(own)) or len({*addresses}) < len(addresses):
            raise ValueError
        if len(addresses) > 1 and not all(re.search(r":\d+$", each) for each in addresses):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SetupError(
            'TF_CONFIG: expected {"cluster": {"worker": ["host:port", ...]}, "task": {"type": '
            '"worker", "index": 0}} with different addresses and an index into them, or no '
            f"TF_CONFIG to train in one process, got {one_line(text, 300)}"
        ) from None
    return Task(len(addresses), addresses.index(own[index]), addresses)


# A chief was called so by TensorFlow's Estimators.
_MASTER = {"master": "chief"}
