"""Shares values among the processes of a run, between two graph calls.

Every process of a cluster must make the same sequence of graph calls. Otherwise, a collective of
one process would wait forever for the others. So if only one process knows a fact, such as a
signal, the time or a file that it cannot read, the fact is shared here with an all-reduce of a few
numbers. All processes then make the same decision.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from ctl_core.cluster.facts import Facts, describe_differences
from ctl_core.cluster.task import Task, answers, describe_loss
from ctl_core.compat import publish, read_published
from ctl_core.run.errors import CtlError, PeerLost, RunError, SetupError
from ctl_core.types import GraphFunction

# The errors that TensorFlow raises on the remaining processes when another process is gone.
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
_ABORTED = "Collective ops is aborted by"
_UNLIKE = re.compile("mismatch in the collective|is joining a group with size")
# The time to wait for the string of another process before checking that the process still listens
# (seconds), and the number of failed checks in a row after which the process is considered lost.
_WAIT = 2.0
_MOST_SILENT = 3
# Counts the strings that the processes share. A string has the same number on all processes,
# because all processes share their strings in the same order.
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class LoopStatus:
    """The status of a process after a graph call, or the status that all of them agree on.

    Attributes:
        steps_per_call: the maximum number of steps in the next graph call; the lowest value counts
        signal: the number of the signal that was received, or 0; the highest counts
        save: whether a checkpoint is wanted, see ``Checkpoints.is_save_wanted``; one process is
            enough
        end: whether a hook or ``early_stop`` ends training; one process is enough
        step: the number of the last step; must be the same on all processes
        frozen: a number that identifies the set of frozen layers; must be the same on all processes
        data: a number that identifies the data that were drawn; while training, it identifies the
            last step of the run, too. Must be the same on all processes
        first: the first step whose loss was not finite, as in ``NonFinite``; the lowest counts
        latest: the latest step whose loss was not finite; the highest counts
        bad: the number of steps whose loss was not finite; the highest counts
        has_weight: whether an evaluated sample weight was neither 0 nor NaN; one process is enough
    """

    steps_per_call: int
    signal: int = 0
    save: bool = False
    end: bool = False
    step: int = 0
    frozen: int = 0
    data: int = 0
    first: int = 2**62  # the same value as NEVER in numerics/not_finite.py
    latest: int = 0
    bad: int = 0
    has_weight: bool = False


# For these fields of ``LoopStatus``, the lowest value of all processes counts. For all other
# fields, the highest value counts.
_LOWEST = ("steps_per_call", "first")


class Cluster:
    """Exchanges values between this process and the other processes of a run.

    Attributes:
        task: this process in its cluster
    """

    def __init__(self, strategy: tf.distribute.Strategy, task: Task) -> None:
        self.task = task
        self._strategy = strategy

    def gather(self, values: Sequence[int]) -> np.ndarray:
        """Returns the integers that all processes pass; waits for all processes, like a barrier.

        Args:
            values: the integers of this process; every process must pass the same number of them

        Returns:
            An array int64[processes, len(values)].
        """
        row = np.array(values, np.int64)
        if self.task.processes == 1:
            return row[None]
        table: np.ndarray = self._gather(row).numpy()  # has a row for each replica
        replicas_per_process = len(table) // self.task.processes
        return table[::replicas_per_process]

    @functools.cached_property
    def _gather(self) -> GraphFunction:
        """The graph function that gathers a row from each replica.

        Each replica creates a table in which all rows except its own are zero. The sum of these
        tables over all replicas contains all rows.
        """

        def sum_tables(values: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            replica = context.replica_id_in_sync_group
            is_row = tf.one_hot(replica, context.num_replicas_in_sync, dtype=tf.int64)
            table = is_row[:, None] * values
            rows: tf.Tensor = context.all_reduce(tf.distribute.ReduceOp.SUM, table)
            return rows

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.int64)])
        def gather(values: tf.Tensor) -> tf.Tensor:
            table = self._strategy.run(sum_tables, (values,))
            rows: tf.Tensor = self._strategy.experimental_local_results(table)[0]
            return rows

        return gather

    def sync(self, status: LoopStatus, hook: object) -> LoopStatus:
        """Shares the status of this process, and returns the status that all processes agree on.

        Args:
            status: the status of this process
            hook: the hook that returns the data, for a message

        Raises:
            RunError: the processes have taken different steps, or have different frozen layers.
            SetupError: ``hook`` returns different data on the processes.
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
        """Returns the strings of all processes, in order, once every process has called this.

        Unlike ``gather``, this method makes no graph call, so it works even if the processes have
        different numbers of devices. A call takes milliseconds, so use it only at the start of a
        run.

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
        """Waits for the string of another process, which may still be busy with its hooks."""
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
        """Raises an error if the processes differ in a fact.

        Args:
            facts: the facts of this process
            problem: the beginning of the message about a difference
            cure: the end of the message, with the remedy
            absent: the value to assume if a process lacks a fact; with None, the fact of this
                process is not compared

        Raises:
            SetupError: there is a difference; the message names the process, the fact and both
                values.
        """
        tables = [json.loads(text) for text in self.share(json.dumps(facts))]
        differences = describe_differences(self.task, tables, absent)
        if differences is not None:
            raise SetupError(f"{problem}: {differences}; {cure}")


def _check_equal(subject: str, column: np.ndarray, step: int) -> None:
    """Raises an error if values differ between the processes after a step."""
    if len({*column}) > 1:
        raise RunError(
            f"after step {step}, the {subject} differ between the processes: a hook must make "
            "the same decision in every process, not one that depends on the process's own "
            "output or batch."
        )


@contextlib.contextmanager
def join_peers(task: Task) -> Iterator[None]:
    """Raises ``PeerLost`` in place of TensorFlow's errors if another process is gone."""
    try:
        yield
    except (tf.errors.OpError, CtlError) as error:
        cause: BaseException | None = error
        if not isinstance(error, tf.errors.OpError):
            cause = error.__cause__
        # If a hook fails with an error that names no task of the cluster, the error has another
        # cause, such as a file system.
        is_of_engine = cause is error or _ABORTED in str(cause) or "/job:" in str(cause)
        if not (is_of_engine and is_peer_lost(task, cause)):
            raise
        raise PeerLost(describe_loss(task, cause)) from error


def is_peer_gone(error: BaseException) -> bool:
    """Returns True if an error says that a collective ended because of another process."""
    return _ABORTED in str(error)


def is_peer_lost(task: Task, error: BaseException | None) -> bool:
    """Returns True if an error says that another process is gone, or failed first."""
    if task.processes == 1 or not isinstance(error, tf.errors.OpError):
        return False
    # If processes differ in shapes or numbers of devices, they would differ after a restart, too.
    if _UNLIKE.search(str(error)):
        return False
    return isinstance(error, _LOST) or _ABORTED in str(error)
