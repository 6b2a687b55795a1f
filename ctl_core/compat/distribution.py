"""Wraps private TensorFlow APIs for replicas, for their summaries, and for joining a cluster."""

from __future__ import annotations

import base64
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_utils,
    distribute_lib,
)
from tensorflow.python.distribute.failure_handling import preemption_watcher
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.eager import context
from tensorflow.python.ops import collective_ops, summary_ops_v2

from ctl_core.compat.patches import Scope, set_attributes, wrap_function


@contextlib.contextmanager
def enter_replica_context(replica_context: tf.distribute.ReplicaContext) -> Iterator[None]:
    """Enters a replica context, even if this context has been entered already.

    TensorFlow itself would also change which replica writes summaries. This function prevents that.
    """
    state = summary_ops_v2._summary_state
    recording = state.is_recording_distribution_strategy
    recording_outside = replica_context._summary_recording_distribution_strategy
    try:
        with replica_context:
            state.is_recording_distribution_strategy = recording
            yield
    finally:
        replica_context._summary_recording_distribution_strategy = recording_outside


@contextlib.contextmanager
def convert_variables() -> Iterator[None]:
    """Makes ``float`` and ``int`` accept a variable that has a component on each replica."""
    of_float = wrap_function(DistributedVariable, "__float__", _convert_to_float)
    of_int = wrap_function(DistributedVariable, "__int__", _convert_to_int)
    with of_float, of_int:
        yield


def _convert_to_float(_: Callable[..., float] | None, variable: tf.Variable) -> float:
    return float(variable.numpy())


def _convert_to_int(_: Callable[..., int] | None, variable: tf.Variable) -> int:
    return int(variable.numpy())


@contextlib.contextmanager
def enter_update(strategy: tf.distribute.Strategy, number: int) -> Iterator[None]:
    """Enters the context in which ``strategy.extended.update`` calls a function for a device.

    A replica cannot call ``update`` itself, because ``update`` runs for all devices at once.

    Args:
        strategy: the strategy of the replica that calls this function
        number: the index of the replica's device among the devices of this process
    """
    distribute_lib._push_per_thread_mode(distribute_lib._CrossReplicaThreadMode(strategy))
    try:
        with distribute_lib.UpdateContext(number):
            yield
    finally:
        distribute_lib._pop_per_thread_mode()


class GraphWriter(tf.summary.SummaryWriter):
    """A summary writer for a graph. It is opened when the first summary in the graph is traced."""

    def __init__(self, open_writer: Callable[[], tf.summary.SummaryWriter | None]) -> None:
        """Stores the function that opens the writer.

        Args:
            open_writer: returns the opened writer, or None if the graph must contain the summaries
                but this process does not write them
        """
        self._open_writer = open_writer

    @functools.cached_property
    def _resource(self) -> tf.Tensor:
        with tf.init_scope(), tf.device("CPU:0"):
            writer = self._open_writer()
            if writer is None:
                return tf.raw_ops.SummaryWriter(shared_name="unopened", container="")
            return writer._resource

    def init(self) -> None:
        """Does nothing, because ``open_writer`` returns a writer that is already initialized."""

    def flush(self) -> None:
        """Does nothing, because the owner of the opened writer flushes that writer."""

    def close(self) -> None:
        """Does nothing, because the owner of the opened writer closes that writer."""


@contextlib.contextmanager
def mute_other_summaries(step: tf.Tensor, replica: int | tf.Tensor | None = None) -> Iterator[None]:
    """Lets only the first replica write summaries.

    TensorFlow itself decides before the graph runs which replica writes summaries. The graphs of
    the other replicas are then simplified differently and round differently, so that the variables
    of the replicas drift apart. Here, the decision is part of the graph.

    Args:
        step: the number of the step, an integer scalar
        replica: the index of the replica; None means the replica that calls this function
    """
    if replica is None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group

    def is_first() -> tf.Tensor:
        # The minimum is always 0. Because TensorFlow cannot know this, it keeps the comparison.
        return tf.equal(tf.cast(replica, step.dtype), tf.minimum(step, 0))

    state = summary_ops_v2._summary_state
    with set_attributes(state, is_recording_distribution_strategy=is_first):
        yield


def has_started() -> bool:
    """Returns whether TensorFlow has created its devices in this process, which starts threads."""
    return bool(context.context()._initialized)


def cut_join(seconds: float) -> Scope:
    """Limits how long processes that join a cluster wait for a lost process.

    Without this limit, they wait for one hour.

    Args:
        seconds: the maximum time to wait (seconds)
    """
    process_context = context.context()

    def configure(*args: Any, **options: Any) -> None:
        options["cluster_register_timeout_in_ms"] = int(1000 * seconds)
        context.Context.configure_coordination_service(process_context, *args, **options)
        process_context.coordination_service.cluster_register_with_barrier = True

    return set_attributes(process_context, configure_coordination_service=configure)


def gather_from_replicas(value: tf.Tensor) -> tf.Tensor:
    """Returns the tensors of the replicas of all processes, concatenated along the first axis.

    Each replica calls this in a graph, with a tensor of the same shape. The public ``all_gather``
    exchanges the shapes first, which takes as long as the exchange of a small tensor.

    Args:
        value: a tensor of dtype float32, float64 or int64, with at least one axis
    """
    replica_context = tf.distribute.get_replica_context()
    cross_device_ops = replica_context.strategy.extended._cross_device_ops
    launcher = cross_device_ops._launchers[replica_context._replica_id]
    options = tf.distribute.experimental.CommunicationOptions()
    gathered: tf.Tensor = launcher._all_gather(value, options)
    return gathered


class _Collective(threading.local):
    """The tensor that this thread passes to a collective, if its shape varies; otherwise None."""

    varying: tf.Tensor | None = None


_collective = _Collective()
# Numbers of collectives that belong to different sizes differ by multiples of this number.
_NUMBERS_OF_SIZE = 2**18
# A prime, so that sizes of different steps rarely have the same remainder.
_SIZES = 16381


@contextlib.contextmanager
def let_sizes_vary() -> Iterator[None]:
    """Lets the size of a tensor that processes exchange vary between the steps of a graph call.

    TensorFlow identifies a collective by a number, and requires the same shape whenever the number
    is used in a graph call. Here, the number also depends on the size.
    """
    launcher = cross_device_utils.CollectiveReplicaLauncher
    of_gather = wrap_function(launcher, "_all_gather", _call_collective)
    of_reduce = wrap_function(launcher, "all_reduce", _call_collective)
    of_number = wrap_function(launcher, "_next_instance_key", _number_collective)
    with of_gather, of_reduce, of_number:
        yield


def _call_collective(
    of_tensorflow: Callable[..., tf.Tensor], launcher: Any, value: tf.Tensor, *args: Any, **how: Any
) -> tf.Tensor:
    if value.shape.is_fully_defined():
        return of_tensorflow(launcher, value, *args, **how)
    with set_attributes(_collective, varying=value):
        return of_tensorflow(launcher, value, *args, **how)


def _number_collective(of_tensorflow: Callable[..., Any], launcher: Any) -> Any:
    number = of_tensorflow(launcher)
    if _collective.varying is None:
        return number
    with tf.device("CPU:0"):
        size = 1 + tf.shape(_collective.varying)[0] % _SIZES
        return tf.convert_to_tensor(number, tf.int32) + _NUMBERS_OF_SIZE * size


def publish(key: str, text: str) -> None:
    """Publishes a string to the other processes through TensorFlow's coordination service.

    Args:
        key: a key under which no process has published a string yet
        text: the string
    """
    context.context().set_config_key_value(key, text)


def read_published(key: str, seconds: float) -> str | None:
    """Waits for a string that a process of the cluster publishes, and returns the string.

    Args:
        key: the key under which the string is published
        seconds: the maximum time to wait (seconds)

    Returns:
        The string; None if no string was published in time.
    """
    try:
        text: str = context.context().get_config_key_value(key, int(1000 * seconds))
    except tf.errors.DeadlineExceededError:
        return None
    return text


def read_preemption(seconds: float) -> bool:
    """Waits until TensorFlow's own handler of SIGTERM reports a signal.

    TensorFlow installs the handler when a process joins a cluster. A thread looks once a second
    whether the handler was called, and then publishes a string.

    Args:
        seconds: the maximum time to wait (seconds)

    Returns:
        True if a process of the cluster has received SIGTERM while the handler was installed.
    """
    try:
        return read_published(preemption_watcher._PREEMPTION_KEY, seconds) is not None
    except tf.errors.FailedPreconditionError:  # this process is alone, and joined no other one
        return False


Encode = Callable[[tf.Tensor], tf.Tensor]
Decode = Callable[[tf.Tensor, tf.DType], tf.Tensor]
# The dtypes that TensorFlow can broadcast.
_BROADCAST = (tf.bool, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
# The maximum length of a published piece of a long string, and the time to wait for one (seconds).
_PIECE = 2**20
_WAIT = 60.0


@contextlib.contextmanager
def broadcast_any_dtype(encode: Encode, decode: Decode) -> Iterator[None]:
    """Lets processes create variables of any dtype.

    The first process sends the initial value of a variable to the others. TensorFlow can send only
    some dtypes. Other numbers are converted, and strings are published.

    Args:
        encode: converts a tensor to a dtype that TensorFlow can send
        decode: converts the result of ``encode`` back to the given dtype
    """
    send = wrap_function(collective_ops, "broadcast_send", functools.partial(_send, encode))
    receive = wrap_function(
        collective_ops, "broadcast_recv", functools.partial(_receive, encode, decode)
    )
    with send, receive:
        yield


def _send(
    encode: Encode,
    of_tensorflow: Callable[..., Any],
    value: tf.Tensor,
    _: tf.TensorShape,
    dtype: tf.DType,
    *keys: int,
    **options: Any,
) -> Any:
    """Sends a value. ``keys`` are the group's size, its key, and the key of the instance."""
    _group_size, group_key, instance_key = keys
    if dtype == tf.string:
        text = base64.b64encode(tf.io.serialize_tensor(value).numpy()).decode()
        pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
        for number, piece in enumerate([str(len(pieces)), *pieces]):
            publish(_name_piece(group_key, instance_key, number), piece)
        return tf.no_op()
    if dtype not in _BROADCAST:
        value = encode(value)
    return of_tensorflow(value, value.shape, value.dtype, *keys, **options)


def _receive(
    encode: Encode,
    decode: Decode,
    of_tensorflow: Callable[..., Any],
    shape: tf.TensorShape,
    dtype: tf.DType,
    *keys: int,
    **options: Any,
) -> tf.Tensor:
    """Receives the value that ``_send`` has sent with the same keys."""
    _group_size, group_key, instance_key = keys
    received: tf.Tensor
    if dtype in _BROADCAST:
        received = of_tensorflow(shape, dtype, *keys, **options)
        return received
    if dtype == tf.string:
        pieces = int(_wait_for_piece(group_key, instance_key, 0))
        text = "".join(
            _wait_for_piece(group_key, instance_key, number + 1) for number in range(pieces)
        )
        return tf.io.parse_tensor(base64.b64decode(text), tf.string)
    encoded = encode(tf.cast(tf.zeros(shape), dtype))  # has the shape and dtype that are sent
    received = of_tensorflow(encoded.shape, encoded.dtype, *keys, **options)
    return decode(received, dtype)


def _wait_for_piece(group_key: int, instance_key: int, number: int) -> str:
    """Returns a published piece; raises an error if the process that publishes is lost."""
    piece = None
    while piece is None:
        piece = read_published(_name_piece(group_key, instance_key, number), _WAIT)
    return piece


def _name_piece(group_key: int, instance_key: int, number: int) -> str:
    return f"ctl_core/initial/{group_key}/{instance_key}/{number}"


def list_cpu_devices(count: int) -> Scope:
    """Makes MultiWorkerMirroredStrategy create ``count`` replicas on a CPU instead of one."""
    if count == 1:
        return contextlib.nullcontext()

    def initialize_devices(
        _: tf.distribute.StrategyExtended,
        _resolver: tf.distribute.cluster_resolver.ClusterResolver,
        worker: str,
    ) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker}/device:CPU:{index}" for index in range(count)), "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    return set_attributes(extended, _initialize_local_devices=initialize_devices)
