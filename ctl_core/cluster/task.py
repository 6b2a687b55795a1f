"""What a process knows of its cluster: its number, all addresses, and who has told it so."""

from __future__ import annotations

import dataclasses
from typing import Literal

# Names the file descriptor of a pipe that ends when the supervisor of a local cluster does.
PIPE = "SUPERVISOR_PIPE"


@dataclasses.dataclass(frozen=True)
class Task:
    """This process's place in the cluster; alone, it is the chief of one.

    Attributes:
        processes: how many train together
        index: this one's number, from 0; number 0 is the chief
        addresses: of all processes, as host:port
    """

    processes: int = 1
    index: int = 0
    addresses: tuple[str, ...] = ()

    @property
    def chief(self) -> bool:
        """Whether this process prints, writes summaries and keeps the checkpoints."""
        return self.index == 0

    def shown(self, index: int) -> str:
        """Names a process, such as ``process 1 at host2:2222``."""
        return f"process {index} at {self.addresses[index]}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process runs, as what started it says.

    Attributes:
        kind: who says so; none: nobody
        name: the same in words, such as ``Slurm step 12.0``
        task: the place in the cluster
        gpus: this process's part of the GPUs that it shares with others of its machine, as
            CUDA_VISIBLE_DEVICES has it; None: all that it sees are its own
        evaluates: whether it is to evaluate what the others train
        one_console: whether all processes print to the same console
        note: what else was found, and is left alone
    """

    kind: Literal["none", "tf_config", "slurm", "kubernetes", "skypilot"] = "none"
    name: str = "no cluster"
    task: Task = Task()
    gpus: str | None = None
    evaluates: bool = False
    one_console: bool = False
    note: str = ""

    @property
    def in_cluster(self) -> bool:
        """Whether something has told this process what it is; a cluster may be of one."""
        return self.kind == "tf_config" or self.task.processes > 1

    def lines(self) -> list[str]:
        """Returns what is said of the place before training."""
        task, said = self.task, [self.note] if self.note else []
        if self.evaluates:
            return [*said, f"cluster: {self.name}; this is its evaluator: evaluate --watch."]
        if task.processes == 1 or (self.one_console and not task.chief):
            return [] if task.processes > 1 else said
        hosts = list(dict.fromkeys(address.rpartition(":")[0] for address in task.addresses))
        shown = ", ".join(hosts[:8]) + f" and {len(hosts) - 8} more" * (len(hosts) > 8)
        return [
            *said,
            f"cluster: {self.name}: {task.processes} processes on {shown}; this is "
            f"{task.shown(task.index)}.",
        ]
