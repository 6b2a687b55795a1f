"""Writes checkpoints in the background, from copies of all variables, while training continues.

TensorFlow's own asynchronous checkpoints (``CheckpointOptions(enable_async=True)``) are not used,
because they fail at the second save of a Keras 3 model.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf

from ctl_core.checkpoint.record import Record, digest_files, note_first_checkpoint, write_record
from ctl_core.checkpoint.retention import keep_and_remove
from ctl_core.cluster.sync import is_peer_lost
from ctl_core.compat import (
    GraphCheckpoint,
    Node,
    call_with_captures,
    hold_objects,
    list_captured_inputs,
    saves_itself,
)
from ctl_core.model.copies import define_copy
from ctl_core.model.state import State
from ctl_core.numerics.reduction import is_float8
from ctl_core.numerics.variables import name_variable, unwrap
from ctl_core.run.errors import RunError, format_error
from ctl_core.run.files import relative_path
from ctl_core.types import Count, Trackable, Variable

# Any large odd number, so that the factors of neighboring elements differ in many bits.
_ODD = 0x5851F42D4C957F2D
# The integer dtype for each size of a dtype in bytes. The 16 bytes of a complex128 become two
# integers.
_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64, 16: tf.int64}


# The threads of this process that are writing a checkpoint.
_writing_threads: set[int] = set()


class StagingCopy:
    """A copy of a checkpoint: the same structure of objects, with copies of all variables.

    The copies use as much host memory as the checkpoint.

    Attributes:
        checkpoint: the checkpoint to be written
        is_complete: whether everything was copied; a lookup table, for example, cannot be copied
        sources: the variables that are copied
        targets: the copies of ``sources``, in the same order
    """

    def __init__(self, original: tf.train.Checkpoint) -> None:
        self.checkpoint = GraphCheckpoint()
        self.is_complete = True
        self.sources: list[tf.Variable] = []
        self.targets: list[tf.Variable] = []
        descendants = tf.train.TrackableView(original).descendants()
        copies: dict[int, Trackable] = {id(original): self.checkpoint}
        for trackable in descendants:
            # The save counter has no copy, and neither has an object inside a variable.
            copy = copies.get(id(trackable))
            if not isinstance(copy, Node | GraphCheckpoint):
                continue
            for name, child in tf.train.TrackableView.children(trackable).items():
                if trackable is original and name == "save_counter":
                    continue  # the copied checkpoint creates its own counter
                if id(child) not in copies:
                    copies[id(child)] = _copy(child)
                copy.children[name] = copies[id(child)]
        for trackable in descendants:
            copy = copies.get(id(trackable))
            if copy is trackable:
                self.is_complete = False
            if isinstance(copy, tf.Variable):
                self.sources.append(unwrap(trackable))
                self.targets.append(copy)
        self.checkpoint.in_graph = self.is_complete
        if self.targets:
            self.checkpoint.device = self.targets[0].device


def _copy(trackable: Trackable) -> Trackable:
    """Returns the copy of an object of a checkpoint, without its children.

    The copy of a variable is a variable with the same name and shape in host memory. An object that
    saves itself, such as a lookup table, cannot be copied and is returned itself. The copy of any
    other object is an empty node.
    """
    variable = unwrap(trackable)
    if isinstance(variable, tf.Variable):
        with tf.device("CPU:0"):
            sizes: tf.TensorShape | tf.Tensor = variable.shape
            if not variable.shape.is_fully_defined():
                sizes = tf.shape(variable)
            return tf.Variable(
                _create_zeros(sizes, variable.dtype),
                trainable=False,
                name=variable.name.split(":")[0],
                shape=variable.shape,
            )
    if saves_itself(trackable):
        return trackable
    return Node()


def _create_zeros(shape: tf.TensorShape | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns zeros; ``tf.zeros`` does not support float8."""
    if is_float8(dtype):
        return tf.cast(tf.zeros(shape), dtype)
    return tf.zeros(shape, dtype)


class CheckpointCopies:
    """Copies of the user's part and of the engine's part of a checkpoint."""

    def __init__(self, user_part: tf.train.Checkpoint, engine_part: tf.train.Checkpoint) -> None:
        """Creates the copies; ``update`` sets them to the current values of the variables."""
        user_copy = StagingCopy(user_part)
        engine_copy = StagingCopy(engine_part)
        self.user_part = user_copy.checkpoint
        self.engine_part = engine_copy.checkpoint
        self.is_complete = user_copy.is_complete and engine_copy.is_complete
        self.update = define_copy(
            user_copy.sources + engine_copy.sources, user_copy.targets + engine_copy.targets
        )


class Writer:
    """Writes checkpoints: first the user's part, then the engine's part, and the record last.

    Attributes:
        written: the steps and path prefixes of the checkpoints that are complete and not yet
            reported to the listeners
        pool: an executor with the thread that writes
    """

    def __init__(self, state: State, engine_part: tf.train.Checkpoint) -> None:
        self._state = state
        self._engine_part = engine_part
        self._copies: CheckpointCopies | None = None
        self._pending: Future[None] | None = None
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.written: list[tuple[int, Path]] = []

    def write(self, record: Record, write_position: Callable[[], None]) -> None:
        """Starts writing a checkpoint; call ``wait`` before the next call.

        Only the chief writes, but every process of a cluster must call this method: if each replica
        has its own value of a variable, copying the variable sums these values over all processes.

        In two cases, the checkpoint is complete when this method returns: if it is the first one of
        this process, so that the run has a checkpoint as early as possible, or if it contains
        objects that cannot be copied, such as lookup tables.
        """
        copies = self._copies
        is_first = copies is None
        if copies is None:
            copies = CheckpointCopies(self._state.ckpt, self._engine_part)
            self._copies = copies
        copies.update()
        if not self._state.cluster.task.chief:
            return
        counter = self._state.ckpt.save_counter
        copies.user_part.save_counter.assign(counter)
        counter.assign_add(1)
        if is_first or not copies.is_complete:
            self._write(copies, record, write_position)
        else:
            self._pending = self.pool.submit(self._write, copies, record, write_position)

    def wait(self) -> None:
        """Waits until the last checkpoint is written; raises an error if this has failed."""
        if self._pending is not None:
            self._pending.result()

    def _write(
        self, copies: CheckpointCopies, record: Record, write_position: Callable[[], None]
    ) -> None:
        manager = self._state.manager
        folder = Path(manager.directory)
        keep_all = not self._state.has_finite_weights
        with _note_writing():
            with hold_objects(manager, copies.user_part, keep_all):
                saved = manager.save(checkpoint_number=record.step)
            if saved is None:
                raise RunError("create_ckpt's manager did not save; leave out its step_counter.")
            copies.engine_part.write(str(folder / "engine" / f"ckpt-{record.step}"))
            write_position()
            if self._state.config.mirror is not None:
                record.digests = digest_files(folder, record.step)
            write_record(folder, record)
            note_first_checkpoint(self._state.run_dir, record.step)
            keep_and_remove(self._state, record)
        self.written.append((record.step, Path(saved)))


def is_writing() -> bool:
    """Returns True if a thread of this process writes a checkpoint."""
    return bool(_writing_threads)


@contextlib.contextmanager
def _note_writing() -> Iterator[None]:
    """Notes that this thread writes a checkpoint, for ``is_writing``."""
    thread = threading.get_ident()
    _writing_threads.add(thread)
    try:
        yield
    finally:
        _writing_threads.discard(thread)


class Divergence:
    """Checks before each checkpoint that the variables of all replicas and processes are equal.

    Each replica computes its update from the summed gradients. If the update also depends on the
    output or the batch of that replica, the replicas diverge, and a checkpoint would contain the
    variables of only one replica.
    """

    def __init__(self, state: State, variables: Iterable[Variable]) -> None:
        """Prepares to compare variables, which must have the same values on all replicas."""
        compared = []
        if state.strategy.num_replicas_in_sync > 1:
            mirrored = tf.distribute.DistributedValues
            compared = [variable for variable in variables if isinstance(variable, mirrored)]
        self._names = [name_variable(variable) for variable in compared]
        self._cluster = state.cluster
        self._components = [
            state.strategy.experimental_local_results(variable) for variable in compared
        ]
        self._compute_digests = tf.function(self._digest_replicas, autograph=False)

    def _digest_replicas(self) -> list[tf.Tensor]:
        """Returns int64[variables], the digests of all variables, for each local replica.

        The function of the first replica is traced, and called with the variables of each replica.
        """

        def digest_first_replica() -> tf.Tensor:
            find_factors = functools.cache(_make_factors)
            return tf.stack([_digest(first, find_factors) for first, *_ in self._components])

        with tf.device(None):  # ops run on the device of the call
            function = tf.function(
                digest_first_replica,
                autograph=False,
                experimental_attributes={"_noinline": True},
            ).get_concrete_function()
        components = {id(first.handle): (first, *others) for first, *others in self._components}
        captured = [components[id(handle)] for handle in list_captured_inputs(function)]
        digests = []
        for replica in zip(*captured, strict=True):
            with tf.device(replica[0].device):
                handles = [component.handle for component in replica]
                digests.append(call_with_captures(function, [], handles))
        return digests

    def check(self, step: int) -> None:
        """Compares the variables after a step.

        Raises:
            RunError: a variable differs between two replicas; the message names the variable.
        """
        if not self._names:
            return
        local_digests = np.array([digests.numpy() for digests in self._compute_digests()])
        digests = self._cluster.gather(local_digests.ravel().tolist())
        table = digests.reshape(-1, len(self._names))  # shape [replicas, variables]
        differs = table != table[0]
        if not differs.any():
            return
        raise RunError(
            f"after step {step}, {self._names[differs.any(axis=0).argmax()]} differs between "
            f"replicas 0 and {differs.any(axis=1).argmax()}: a hook or an assignment used a "
            "value that differs between replicas, such as output or batch; pass it through "
            "all_reduce first, or let the model assign it to a variable with the aggregation MEAN "
            "or SUM."
        )


def _digest(variable: tf.Variable, find_factors: Callable[[int], tf.Tensor]) -> tf.Tensor:
    """Returns a digest of a variable's bits.

    The elements are converted to integers and summed modulo 2**64. Before the sum, each element is
    multiplied by an odd number that depends on its position.

    Args:
        variable: the variable
        find_factors: returns the numbers by which elements are multiplied, given how many there are
    """
    bits = tf.reshape(tf.cast(_read_bits(variable.read_value()), tf.int64), [-1])
    size = bits.shape[0]
    factors = _make_factors(tf.size(bits, tf.int64)) if size is None else find_factors(size)
    return tf.reduce_sum(bits * factors)


def _make_factors(size: Count) -> tf.Tensor:
    """Returns different odd numbers, int64[size]."""
    factors: tf.Tensor = tf.range(tf.cast(size, tf.int64)) * _ODD * 2 + 1
    return factors


def _read_bits(value: tf.Tensor) -> tf.Tensor:
    """Returns a value as integers; different values give different integers."""
    if value.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(value, 2**62)
    if value.dtype.is_bool:
        return value
    if is_float8(value.dtype):  # there is no bitcast
        value = tf.cast(value, tf.float32)
    return tf.bitcast(value, _BITS[value.dtype.size])


@contextlib.contextmanager
def write_together(state: State, step: int) -> Iterator[None]:
    """Waits for all processes at the end of the context; if one process fails, all of them fail.

    Raises:
        RunError: this process or another process cannot write a file.
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
            cause = getattr(failure, "strerror", None) or format_error(failure, 400).split("; ")[-1]
            why = f": {cause}"
        then = "earlier checkpoints are kept."
        if not state.run_dir.is_dir():
            then = "the folder of the run was removed during training."
        raise RunError(
            f"the checkpoint of step {step} cannot be written to "
            f"{relative_path(state.manager.directory)}{why}; {then}"
        ) from failure
