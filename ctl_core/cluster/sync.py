"""What the processes of a run tell each other between two graph calls.

Every process of a cluster must make the same sequence of graph calls, or their collectives no
longer meet. So whatever one process alone knows (a signal, its clock, a file that it cannot
read) is told to all here, in an all-reduce of a few numbers, and all decide alike.
"""

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.cluster.task import Task, describe_loss
from ctl_core.run.errors import CtlError, PeerLost, RunError, SetupError
from ctl_core.run.settings import Config

# What TensorFlow says on the processes that are left when one is gone.
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
_ABORTED = "Collective ops is aborted by"
_UNLIKE = re.compile("mismatch in the collective|is joining a group with size")


@dataclasses.dataclass(frozen=True)
class LoopStatus:
    """What a process knows after a graph call, and what all of them make of it.

    Attributes:
        steps_per_call: most steps of the next graph call; the lowest counts
        signal: the signal it received, or 0; the highest counts
        save, end: whether a hook asked for a checkpoint, or for the end; one is enough
        step, frozen, data: a number of what was drawn; must be the same everywhere
        first, latest, bad: of the steps whose loss was not finite, as ``NonFinite`` has them; the
            lowest, the highest and the highest count
    """

    steps_per_call: int
    signal: int = 0
    save: bool = False
    end: bool = False
    step: int = 0
    frozen: int = 0
    data: int = 0
    first: int = 2**62  # NEVER, as numerics/not_finite.py has it
    latest: int = 0
    bad: int = 0


# Of these the lowest value counts, of all others the highest.
_LOWEST = ("steps_per_call", "first")


class Cluster:
    """The processes of a run, as this one, ``task``, sees them."""

    def __init__(self, strategy: tf.distribute.Strategy, task: Task) -> None:
        self.task = task
        self._strategy = strategy

    def gather(self, values: Sequence[int]) -> np.ndarray:
        """Returns the whole numbers of all processes, int64 [processes, len(values)]; a barrier."""
        own = np.array(values, np.int64)
        if self.task.processes == 1:
            return own[None]
        table = self._gather(own).numpy()  # with a row for each replica
        return table[:: len(table) // self.task.processes]  # type: ignore[no-any-return]

    @functools.cached_property
    def _gather(self) -> Any:
        """The graph function: all add up a table in which only the own row of each is not zero."""

        def on_replica(values: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            replica, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
            own = tf.one_hot(replica, replicas, dtype=tf.int64)[:, None] * values
            return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.int64)])
        def gather(values: tf.Tensor) -> tf.Tensor:
            table = self._strategy.run(on_replica, (values,))
            return self._strategy.experimental_local_results(table)[0]

        return gather

    def sync(self, status: LoopStatus, hook: object) -> LoopStatus:
        """Takes this process's status and returns that of all of them.

        Raises:
            RunError: hooks have frozen other layers, or taken other steps, than elsewhere.
            SetupError: ``hook`` gives other data than elsewhere.
        """
        if self.task.processes == 1:
            return status
        own = dataclasses.asdict(status)
        table = self.gather([int(value) for value in own.values()])
        columns = dict(zip(own, table.T, strict=True))
        for name, what in (("step", "steps"), ("frozen", "frozen layers")):
            if len({*columns[name]}) > 1:
                raise RunError(
                    f"after step {status.step}, the {what} differ between the processes: a hook "
                    "must decide alike on each of them, not by its own output or batch."
                )
        if len({*columns["data"]}) > 1:
            raise SetupError(
                f"{hook}: the processes of the cluster read different data, or in another order: "
                "sort files that are listed, give shuffles a seed, leave deterministic=False out."
            )
        agreed = {name: (min if name in _LOWEST else max)(columns[name]) for name in own}
        return LoopStatus(**{name: type(own[name])(value) for name, value in agreed.items()})

    def agree(self, well: bool) -> bool:
        """Whether all processes say yes."""
        return bool(self.gather([int(well)]).all())

    def has_same(self, content: bytes) -> bool:
        """Whether all processes have the same."""
        digest = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
        return bool((self.gather([digest]) == digest).all())

    def check_settings(self, config: Config) -> None:
        """Refuses settings that are not the same on every process."""
        # What only says how a process works and reports, not what it computes, may differ.
        own = dataclasses.replace(config, debug=False, runs_dir="runs")
        if not self.has_same(repr(own).encode()):
            raise SetupError(
                "the settings are not the same on every process of the cluster: give each of them "
                "the same config.yaml, CTL_ variables and flags."
            )


@contextlib.contextmanager
def join_peers(task: Task) -> Iterator[None]:
    """Turns what TensorFlow raises when another process is gone into ``PeerLost``."""
    try:
        yield
    except (tf.errors.OpError, CtlError) as error:
        cause = error if isinstance(error, tf.errors.OpError) else error.__cause__
        # What a hook raised: trouble of its own, with a file system say, names no task.
        ours = cause is error or _ABORTED in str(cause) or "/job:" in str(cause)
        if not (ours and is_peer_lost(task, cause)):
            raise
        raise PeerLost(describe_loss(task, cause)) from error


def is_peer_lost(task: Task, error: BaseException | None) -> bool:
    """Whether an error says that another process is gone, or failed first."""
    if task.processes == 1 or not isinstance(error, tf.errors.OpError):
        return False
    if _UNLIKE.search(str(error)):  # shapes or numbers of devices: they would be so again
        return False
    return isinstance(error, _LOST) or _ABORTED in str(error)
