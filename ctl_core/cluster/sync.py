"""Values that the processes of a run share between two graph calls.

Every process of a cluster must make the same sequence of graph calls, or their collectives no
longer meet. So anything that only one process knows (a signal, its clock, a file that it cannot
read) is shared here, in an all-reduce of a few numbers, and all processes make the same decision.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from ctl_core.cluster.facts import Facts, describe_differences
from ctl_core.cluster.task import Task, answers, describe_loss
from ctl_core.compat import publish, read_published
from ctl_core.run.errors import CtlError, PeerLost, RunError, SetupError

# The errors that TensorFlow raises on the remaining processes when one is gone.
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
_ABORTED = "Collective ops is aborted by"
_UNLIKE = re.compile("mismatch in the collective|is joining a group with size")
# How long to wait for the text of another process before checking whether the process still listens
# (seconds), and how many of these checks in a row may fail.
_WAIT = 2.0
_MOST_SILENT = 3
# Numbers the texts that the processes share; all processes share them in the same order.
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class LoopStatus:
    """The status of a process after a graph call, or the status that all of them agree on.

    Attributes:
        steps_per_call: the most steps of the next graph call; the lowest value counts
        signal: the number of the signal that was received, or 0; the highest counts
        save: whether a hook asked for a checkpoint; one process is enough
        end: whether a hook asked to end training; one process is enough
        step: the number of the last step; must be the same on all processes
        frozen: identifies which layers are frozen; must be the same on all processes
        data: a digest of the data that were drawn; must be the same on all processes
        first: the first step whose loss was not finite, as ``NonFinite`` has it; the lowest counts
        latest: the latest such step; the highest counts
        bad: the number of such steps; the highest counts
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


# Of these fields the lowest value counts, of all others the highest.
_LOWEST = ("steps_per_call", "first")


class Cluster:
    """The processes of a run, as seen by this one, ``task``."""

    def __init__(self, strategy: tf.distribute.Strategy, task: Task) -> None:
        self.task = task
        self._strategy = strategy

    def gather(self, values: Sequence[int]) -> np.ndarray:
        """Returns the whole numbers of all processes; a barrier.

        Args:
            values: the numbers of this process, equally many in each of them

        Returns:
            int64[processes, len(values)]
        """
        row = np.array(values, np.int64)
        if self.task.processes == 1:
            return row[None]
        table = self._gather(row).numpy()  # with a row for each replica
        replicas_per_process = len(table) // self.task.processes
        return table[::replicas_per_process]  # type: ignore[no-any-return]

    @functools.cached_property
    def _gather(self) -> Callable[[np.ndarray], tf.Tensor]:
        """The graph function that gathers a row from each replica.

        It sums tables over the replicas; in that of a replica, only its own row is not zero.
        """

        def sum_tables(values: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            replica = context.replica_id_in_sync_group
            is_row = tf.one_hot(replica, context.num_replicas_in_sync, dtype=tf.int64)
            table = is_row[:, None] * values
            return context.all_reduce(tf.distribute.ReduceOp.SUM, table)

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.int64)])
        def gather(values: tf.Tensor) -> tf.Tensor:
            table = self._strategy.run(sum_tables, (values,))
            return self._strategy.experimental_local_results(table)[0]

        return gather  # type: ignore[no-any-return]

    def sync(self, status: LoopStatus, hook: object) -> LoopStatus:
        """Shares the status of this process, and returns the one that all processes agree on.

        Args:
            status: of this process
            hook: the hook whose data must be the same everywhere, for a message

        Raises:
            RunError: hooks have frozen other layers, or taken other steps, than elsewhere.
            SetupError: ``hook`` returns other data than elsewhere.
        """
        if self.task.processes == 1:
            return status
        values = dataclasses.asdict(status)
        table = self.gather([int(value) for value in values.values()])
        columns = dict(zip(values, table.T, strict=True))
        _check_equal("steps", columns["step"], status.step)
        _check_equal("frozen layers", columns["frozen"], status.step)
        if len({*columns["data"]}) > 1:
            raise SetupError(
                f"{hook}: the processes of the cluster read different data, or in a different "
                "order: sort lists of files, give shuffles a seed, and leave out "
                "deterministic=False."
            )
        agreed = {}
        for name, column in columns.items():
            value = max(column)
            if name in _LOWEST:
                value = min(column)
            agreed[name] = type(values[name])(value)
        return LoopStatus(**agreed)

    def agree(self, is_fine: bool) -> bool:
        """Returns True if all processes pass True."""
        return bool(self.gather([int(is_fine)]).all())

    def has_same(self, content: bytes) -> bool:
        """Returns True if all processes pass the same bytes."""
        digest = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
        return bool((self.gather([digest]) == digest).all())

    def share(self, text: str) -> list[str]:
        """Returns the texts of all processes in their order, once all of them have called this.

        Unlike ``gather``, this makes no graph call, so it works even if the processes have
        different numbers of devices. It takes milliseconds, so it is meant for the start of a run.

        Raises:
            PeerLost: another process has ended.
        """
        if self.task.processes == 1:
            return [text]
        number = next(_numbers)
        publish(f"ctl_core/{number}/{self.task.index}", text)
        return [
            self._await_text(f"ctl_core/{number}/{index}", index)
            for index in range(self.task.processes)
        ]

    def _await_text(self, key: str, index: int) -> str:
        """Waits for the text of a process, which may still be running its hooks."""
        silent = 0
        while silent < _MOST_SILENT:
            text = read_published(key, _WAIT)
            if text is not None:
                return text
            silent += 1
            if answers(self.task.addresses[index]):
                silent = 0
        raise PeerLost(
            f"no answer from {self.task.describe(index)}; restart all processes: the run "
            "resumes from its last checkpoint."
        )

    def compare(self, facts: Facts, problem: str, cure: str, absent: str | None = None) -> None:
        """Refuses to train if the processes differ in a fact.

        Args:
            facts: the facts of this process
            problem: the beginning of the message about a difference
            cure: the end of the message, which says what to do
            absent: the value to assume for a fact that a process lacks; None: such a process is not
                compared in this fact

        Raises:
            SetupError: there is a difference; the message names the process, the fact and both
                values.
        """
        tables = [json.loads(text) for text in self.share(json.dumps(facts))]
        differences = describe_differences(self.task, tables, absent)
        if differences is not None:
            raise SetupError(f"{problem}: {differences}; {cure}")


def _check_equal(subject: str, column: np.ndarray, step: int) -> None:
    """Refuses values that differ between the processes after a step."""
    if len({*column}) > 1:
        raise RunError(
            f"after step {step}, the {subject} differ between the processes: a hook must make "
            "the same decision in every process, not one that depends on the process's own "
            "output or batch."
        )


@contextlib.contextmanager
def join_peers(task: Task) -> Iterator[None]:
    """Turns the errors that TensorFlow raises when another process is gone into ``PeerLost``."""
    try:
        yield
    except (tf.errors.OpError, CtlError) as error:
        cause: BaseException | None = error
        if not isinstance(error, tf.errors.OpError):
            cause = error.__cause__
        # An error within a hook that names no task is the hook's, from a file system for instance.
        is_of_engine = cause is error or _ABORTED in str(cause) or "/job:" in str(cause)
        if not (is_of_engine and is_peer_lost(task, cause)):
            raise
        raise PeerLost(describe_loss(task, cause)) from error


def is_peer_lost(task: Task, error: BaseException | None) -> bool:
    """Returns True if an error says that another process is gone, or failed first."""
    if task.processes == 1 or not isinstance(error, tf.errors.OpError):
        return False
    if _UNLIKE.search(str(error)):  # shapes or numbers of devices, which would differ again
        return False
    return isinstance(error, _LOST) or _ABORTED in str(error)
