"""Replica contexts of the engine: the meaning of an exchange between replicas in a trace.

TensorFlow calls the exchanges of a replica by its context: ``all_reduce``, ``all_gather``, and
``merge_call``, which variables and Keras layers use. Entering one of these contexts changes these
methods, for hooks and for code that asks ``tf.distribute.get_replica_context()``, such as a
synchronized batch normalization.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from ctl_core.cluster.collectives import count_local_replicas, distribute
from ctl_core.compat import enter_replica_context
from ctl_core.run.errors import NotCompilable, RefusedCall
from ctl_core.types import Count, Gradient, PerReplica, Structure, UserObject

# Hooks are converted by AutoGraph, and so is every method that they call, unless it is marked.
do_not_convert = tf.autograph.experimental.do_not_convert

NO_EXCHANGE = (
    "needs all replicas at the same time, but a device computes logical replicas one after "
    "another; leave out the call, or logical_replicas."
)

Options: TypeAlias = tf.distribute.experimental.CommunicationOptions | None


class LoneReplica(tf.distribute.ReplicaContext):  # type: ignore[misc]
    """A replica that is traced without the others.

    Exchanged values have the right shapes, but come from this replica only.
    """

    @do_not_convert
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PerReplica:
        """Calls a function as if every replica of this process passed the same arguments."""

        def repeat_arguments(
            strategy: tf.distribute.Strategy, args: Structure, kwargs: Structure
        ) -> Structure:
            def repeat(argument: UserObject) -> PerReplica:
                if not isinstance(argument, tf.Tensor | tf.IndexedSlices):
                    return argument
                return distribute(strategy, [argument] * count_local_replicas(strategy))

            args, kwargs = tf.nest.map_structure(repeat, (args, kwargs))
            merged = merge_fn(strategy, *args, **kwargs)
            return tf.nest.map_structure(
                lambda value: strategy.experimental_local_results(value)[0], merged
            )

        return super().merge_call(repeat_arguments, (args, kwargs or {}))

    @do_not_convert
    def all_reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: Structure, options: Options = None
    ) -> Structure:
        """Returns the value as it is."""
        return tf.nest.map_structure(tf.identity, value)

    @do_not_convert
    def all_gather(self, value: Structure, axis: int, options: Options = None) -> Structure:
        """Returns the value repeated once for each replica."""
        replicas = self.strategy.num_replicas_in_sync

        def repeat(tensor: tf.Tensor) -> tf.Tensor:
            return tf.concat([tf.identity(tensor)] * replicas, axis)

        return tf.nest.map_structure(repeat, value)


class FirstReplica(LoneReplica):
    """A lone replica that is traced as replica 0 on every process of a cluster.

    All processes thus trace the same graph. Variables still use their component on a device of this
    process.
    """

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """0, an int32 scalar."""
        return tf.constant(0)


class InnerContext(tf.distribute.ReplicaContext):  # type: ignore[misc]
    """A context inside another one, to which it delegates every method that it does not change."""

    def __init__(self, outer: tf.distribute.ReplicaContext) -> None:
        number = tf.get_static_value(outer.replica_id_in_sync_group)
        super().__init__(outer.strategy, int(number))
        self._outer = outer

    @do_not_convert
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PerReplica:
        """Calls a function with the arguments of all replicas, as the outer context does."""
        with enter_replica_context(self._outer):
            return self._outer.merge_call(merge_fn, args, kwargs)


class NoExchange(InnerContext):
    """A context in which replicas must not exchange anything, since XLA could not compile it.

    Raises:
        NotCompilable: something is exchanged; the message gives the reason.
    """

    def __init__(self, outer: tf.distribute.ReplicaContext, reason: str) -> None:
        super().__init__(outer)
        self._reason = reason

    @do_not_convert
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PerReplica:
        """Refuses the exchange."""
        raise NotCompilable(self._reason)


class RowWeighted(InnerContext):
    """A context in which the values of a replica count by the rows that it has of a batch.

    A replica without rows computes on a placeholder batch, whose values count in no exchange. If
    no replica has rows, all placeholders count alike: that avoids a mean of nothing.

    Args:
        outer: the context of the replica
        rows: how many rows it has
        present: whether it has any; None if that is certain
        rows_of_all: how many rows all replicas have; None if that is certainly more than 0
    """

    def __init__(
        self,
        outer: tf.distribute.ReplicaContext,
        rows: Count,
        present: tf.Tensor | None,
        rows_of_all: tf.Tensor | None,
    ) -> None:
        super().__init__(outer)
        if present is not None and rows_of_all is not None:
            present = present | (rows_of_all == 0)
            rows = tf.where(rows_of_all == 0, 1, rows)
        self._rows = rows
        self._present = present

    @do_not_convert
    def all_reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: Structure, options: Options = None
    ) -> Structure:
        """Returns the sum over the replicas that have rows, or the mean over all their rows."""
        is_sum = getattr(reduce_op, "value", reduce_op).upper() == "SUM"
        if is_sum:
            return self._sum(value, options)
        return tf.nest.map_structure(lambda tensor: self._average(tensor, options), value)

    def _sum(self, value: Structure, options: Options) -> Structure:
        masked = tf.nest.map_structure(self._mask, value)
        return super().all_reduce(tf.distribute.ReduceOp.SUM, masked, options)

    def _average(self, value: tf.Tensor, options: Options) -> tf.Tensor:
        weight = tf.cast(self._rows, value.dtype)
        total, total_weight = self._sum([value * weight, weight], options)
        return total / total_weight

    def _mask(self, value: Gradient) -> Gradient:
        """Returns zeros in place of the values of a placeholder batch."""
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self._mask(value.values), value.indices, value.dense_shape)
        if self._present is None:
            return value
        return tf.where(self._present, value, tf.zeros_like(value))

    @do_not_convert
    def all_gather(self, value: Structure, axis: int, options: Options = None) -> Structure:
        """Returns the values of all replicas that have rows, concatenated along an axis.

        A replica without rows gets those of all placeholders behind them, because its own code may
        look for its values there.
        """
        gathered = super().all_gather(value, axis, options)
        if self._present is None:
            return gathered

        def cut(tensor: tf.Tensor, gathered: tf.Tensor) -> tf.Tensor:
            own_size = tf.where(self._present, tf.shape(tensor, tf.int64)[axis], 0)
            real_size = tf.distribute.ReplicaContext.all_reduce(
                self, tf.distribute.ReduceOp.SUM, own_size
            )
            size = tf.shape(gathered, tf.int64)[axis]
            kept = tf.where(self._present, real_size, size)
            return tf.split(gathered, tf.stack([kept, size - kept]), axis)[0]

        return tf.nest.map_structure(cut, value, gathered)


class LogicalReplica(InnerContext):
    """A context in which a device computes one of its logical replicas.

    For hooks the logical replica is the replica: they see its index and the number of all. For
    variables the device is the replica, because they find their component by ``_replica_id``.

    Raises:
        RefusedCall: something is exchanged.
    """

    def __init__(self, outer: tf.distribute.ReplicaContext, index: Count, replicas: int) -> None:
        """Enters nothing yet; see ``enter_logical_replica``."""
        super().__init__(outer)
        self._index = index
        self._replicas = replicas

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """The index of the logical replica, an int32 scalar."""
        return tf.convert_to_tensor(self._index)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of logical replicas."""
        return self._replicas

    @do_not_convert
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PerReplica:
        """Refuses the exchange."""
        raise RefusedCall(f"merge_call {NO_EXCHANGE}")

    @do_not_convert
    def all_reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: Structure, options: Options = None
    ) -> Structure:
        """Refuses the exchange."""
        raise RefusedCall(f"all_reduce {NO_EXCHANGE}")

    @do_not_convert
    def all_gather(self, value: Structure, axis: int, options: Options = None) -> Structure:
        """Refuses the exchange."""
        raise RefusedCall(f"all_gather {NO_EXCHANGE}")


def enter_logical_replica(index: Count, replicas: int) -> contextlib.AbstractContextManager[None]:
    """Enters ``LogicalReplica`` on a device.

    Args:
        index: of the logical replica
        replicas: the number of logical replicas
    """
    context = tf.distribute.get_replica_context()
    return enter_replica_context(LogicalReplica(context, index, replicas))


def weigh_by_rows(
    rows: Count, present: tf.Tensor | None, rows_of_all: tf.Tensor | None = None
) -> contextlib.AbstractContextManager[None]:
    """Enters ``RowWeighted`` on a replica, with its arguments.

    Does nothing where all replicas have equally many rows (``rows`` is None), or on a single
    replica.
    """
    context = tf.distribute.get_replica_context()
    if rows is None or context is None or context.num_replicas_in_sync == 1:
        return contextlib.nullcontext()
    if isinstance(context, LogicalReplica):  # which exchanges nothing
        return contextlib.nullcontext()
    return enter_replica_context(RowWeighted(context, rows, present, rows_of_all))


def forbid_exchanges(reason: str) -> contextlib.AbstractContextManager[None]:
    """Enters ``NoExchange`` on a replica; does nothing on a single one."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return contextlib.nullcontext()
    if isinstance(context, LogicalReplica):  # refuses exchanges by itself
        return contextlib.nullcontext()
    return enter_replica_context(NoExchange(context, reason))
