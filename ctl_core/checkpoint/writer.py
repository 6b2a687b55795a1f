"""Writes a checkpoint in the background, from copies of all variables, while training goes on.

TensorFlow's own asynchronous checkpoints (``CheckpointOptions(enable_async=True)``) fail at the
second save of a Keras 3 model.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.checkpoint.record import Record, keep_best, remove_orphans, write_record
from ctl_core.cluster.sync import is_peer_lost
from ctl_core.compat import GraphCheckpoint, Node, hold_objects, saves_itself
from ctl_core.model.copies import define_copy
from ctl_core.model.state import State
from ctl_core.numerics.variables import name_variable, unwrap
from ctl_core.run.errors import RunError, format_error
from ctl_core.run.files import relative_path

_ODD = 0x5851F42D4C957F2D  # any large odd number; spreads neighbouring positions
# By size in bytes; 16 are those of complex128, which become two numbers.
_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64, 16: tf.int64}


class StagingCopy:
    """A checkpoint of copies: the same objects by the same names, with variables of its own.

    Costs host memory of the size of a checkpoint.

    Attributes:
        checkpoint: what is to be written
        is_whole: whether all of it are copies; a table, say, is itself in the checkpoint
        sources, targets: the variables and their copies
    """

    def __init__(self, original: tf.train.Checkpoint) -> None:
        parts = tf.train.TrackableView(original).descendants()
        self.checkpoint = GraphCheckpoint()
        copies: dict[int, Any] = {id(original): self.checkpoint}
        for part in parts:
            copy = copies.get(id(part))  # none of the counter, nor of what is inside a variable
            if not isinstance(copy, Node | GraphCheckpoint):
                continue
            for name, child in tf.train.TrackableView.children(part).items():
                if part is original and name == "save_counter":
                    continue  # the copy makes its own
                if id(child) not in copies:
                    copies[id(child)] = _copy_part(child)
                copy.children[name] = copies[id(child)]
        self.is_whole = self.checkpoint.in_graph = all(
            copies.get(id(part)) is not part for part in parts
        )
        variables = [part for part in parts if isinstance(copies.get(id(part)), tf.Variable)]
        self.sources = [unwrap(part) for part in variables]
        self.targets = [copies[id(part)] for part in variables]
        if self.targets:
            self.checkpoint.device = self.targets[0].device


def _copy_part(part: Any) -> Any:
    """Returns a variable of the same name and shape, an empty node, or what saves itself."""
    variable = unwrap(part)
    if isinstance(variable, tf.Variable):
        with tf.device("CPU:0"):
            zeros = tf.zeros(variable.shape, variable.dtype)
            return tf.Variable(zeros, trainable=False, name=variable.name.split(":")[0])
    return part if saves_itself(part) else Node()


class Writer:
    """Writes the user's part, the engine's part and the record, in this order.

    ``written`` has the step of each that is whole, and what its files begin with; ``pool`` has the
    thread that writes.
    """

    def __init__(self, state: State, engine_part: tf.train.Checkpoint) -> None:
        self._state = state
        self._parts = [state.ckpt, engine_part]
        self._copies: list[StagingCopy] = []
        self._take: Any = None  # gives the copies the present values
        self._pending: Future[None] | None = None
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.written: list[tuple[int, Path]] = []

    def write(self, record: Record, write_position: Callable[[], None]) -> None:
        """Begins to write a checkpoint; what was begun before must have been waited for.

        Every process of a cluster must call it, since variables that each replica keeps for itself
        are summed up to be copied; the chief writes. The first checkpoint is written at once, so
        that there is one; so is what has no copy since it is no variable, such as a table.
        """
        if first := not self._copies:
            self._copies = user, engine = [StagingCopy(part) for part in self._parts]
            self._take = define_copy(user.sources + engine.sources, user.targets + engine.targets)
        self._take()
        if not self._state.cluster.task.chief:
            return
        counter = self._parts[0].save_counter
        self._copies[0].checkpoint.save_counter.assign(counter)
        counter.assign_add(1)
        if first or not all(copy.is_whole for copy in self._copies):
            self._write(record, write_position)
            return
        self._pending = self.pool.submit(self._write, record, write_position)

    def wait(self) -> None:
        """Waits until what was begun has ended; raises what it has raised."""
        if self._pending is not None:
            self._pending.result()

    def _write(self, record: Record, write_position: Callable[[], None]) -> None:
        user_part, engine_part = (copy.checkpoint for copy in self._copies)
        manager = self._state.manager
        folder = Path(manager.directory)
        with hold_objects(manager, user_part):
            saved = manager.save(checkpoint_number=record.step)
        if saved is None:
            raise RunError("create_ckpt's manager did not save; leave out its step_counter.")
        engine_part.write(str(folder / "engine" / f"ckpt-{record.step}"))
        write_position()
        write_record(folder, record)
        keep_best(folder, record)
        remove_orphans(folder)
        self.written.append((record.step, Path(saved)))


class Divergence:
    """Compares the variables over all replicas and processes, before each checkpoint.

    Each replica works out its own update of the summed gradients. One that depends on a replica's
    own output or batch lets them drift apart, and a checkpoint would hold one replica's opinion.
    """

    def __init__(self, state: State, variables: Iterable[Any]) -> None:
        """``variables`` must be the same everywhere."""
        compared = []
        if state.strategy.num_replicas_in_sync > 1:
            mirrored = tf.distribute.DistributedValues
            compared = [variable for variable in variables if isinstance(variable, mirrored)]
        self._names = [name_variable(variable) for variable in compared]
        self._cluster = state.cluster
        copies = [state.strategy.experimental_local_results(variable) for variable in compared]

        @tf.function(autograph=False)
        def compute_digests() -> list[tf.Tensor]:
            """Returns int64[variables] for each replica of this process."""
            return [tf.stack(list(map(_digest, parts))) for parts in zip(*copies, strict=True)]

        self._compute_digests = compute_digests

    def check(self, step: int) -> None:
        """Raises a RunError that names a variable that is not the same everywhere."""
        if not self._names:
            return
        own = np.array([digests.numpy() for digests in self._compute_digests()])
        everywhere = self._cluster.gather(own.ravel().tolist())
        table = everywhere.reshape(-1, len(self._names))  # [replicas, variables]
        differs = table != table[0]
        if not differs.any():
            return
        raise RunError(
            f"after step {step}, {self._names[differs.any(axis=0).argmax()]} differs between "
            f"replicas 0 and {differs.any(axis=1).argmax()}: a hook or an assign used what only "
            "one sees, such as output or batch; all_reduce it first."
        )


def _digest(variable: Any) -> tf.Tensor:
    """Sums up a variable's bits, each element times an odd number of its position, mod 2**64."""
    with tf.device(variable.device):
        bits = tf.reshape(tf.cast(_read_bits(variable), tf.int64), [-1])
        factors = tf.range(tf.size(bits, tf.int64)) * _ODD * 2 + 1
        return tf.reduce_sum(bits * factors)


def _read_bits(variable: Any) -> tf.Tensor:
    """Returns a variable's value as integers that differ if the value does."""
    value = variable.read_value()
    if value.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(value, 2**62)
    if value.dtype.is_bool:
        return value
    return tf.bitcast(value, _BITS[value.dtype.size])


@contextlib.contextmanager
def write_together(state: State, step: int) -> Iterator[None]:
    """Around one part of the writing: all processes go on when all are done, or none does.

    Raises:
        RunError: a file cannot be written, here or by another process.
    """
    failure: Exception | None = None
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        if is_peer_lost(state.cluster.task, error):
            raise
        failure = error
    if not state.cluster.agree(failure is None):
        why = " by another process"
        if failure is not None:
            said = getattr(failure, "strerror", None) or format_error(failure, 400).split("; ")[-1]
            why = f": {said}"
        raise RunError(
            f"the checkpoint of step {step} cannot be written to "
            f"{relative_path(state.manager.directory)}{why}; earlier checkpoints are kept."
        ) from failure
