"""Defines replica contexts that change how replicas exchange values while they are traced.

Replicas exchange values by calling methods of a replica context: ``all_reduce``, ``all_gather`` and
``merge_call`` (variables and Keras layers use the latter). The contexts in this module override
these methods. Within such a context, the new methods are used by hooks, and by all code that calls
``tf.distribute.get_replica_context()``, such as synchronized batch normalization.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import tensorflow as tf

from ctl_core.cluster.collectives import count_local_replicas, distribute
from ctl_core.compat import enter_replica_context
from ctl_core.run.errors import RefusedCall
from ctl_core.types import Count, Gradient, PerReplica, Structure, UserObject

# AutoGraph converts hooks and all methods that they call, except methods with this decorator.
do_not_convert = tf.autograph.experimental.do_not_convert

NO_EXCHANGE = (
    "needs all replicas at the same time, but a device computes logical replicas one after "
    "another; leave out the call, or logical_replicas."
)

Options: TypeAlias = tf.distribute.experimental.CommunicationOptions | None


class LoneReplica(tf.distribute.ReplicaContext):
    """A context in which one replica is traced without the others.

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
        """Returns the value unchanged."""
        return tf.nest.map_structure(tf.identity, value)

    @do_not_convert
    def all_gather(self, value: Structure, axis: int, options: Options = None) -> Structure:
        """Returns the value repeated once for each replica."""
        replicas = self.strategy.num_replicas_in_sync

        def repeat(tensor: tf.Tensor) -> tf.Tensor:
            return tf.concat([tf.identity(tensor)] * replicas, axis)

        return tf.nest.map_structure(repeat, value)


class FirstReplica(LoneReplica):
    """A ``LoneReplica`` with the index 0 on every process of a cluster.

    All processes thus trace the same graph. Variables still use their component on a device of this
    process.

    Args:
        strategy: the strategy of the replica
        replica: the index of the replica among the replicas of all processes
    """

    def __init__(self, strategy: tf.distribute.Strategy, replica: int) -> None:
        super().__init__(strategy, replica)
        self.replica = replica

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """The index 0, as an int32 scalar."""
        return tf.constant(0)


class InnerContext(tf.distribute.ReplicaContext):
    """A context inside an outer context; delegates every method that it does not override.

    Variables use the same component as in the outer context, even if the outer context reports
    another index, as a ``FirstReplica`` does.

    Attributes:
        replica: the index of the replica among the replicas of all processes
        outer: the outer context
    """

    def __init__(self, outer: tf.distribute.ReplicaContext) -> None:
        self.replica = _find_replica(outer)
        super().__init__(outer.strategy, self.replica)
        self.outer = outer

    @property
    def replica_id_in_sync_group(self) -> int | tf.Tensor:
        """The index that the outer context reports, an int32 scalar or an int."""
        return self.outer.replica_id_in_sync_group

    @do_not_convert
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PerReplica:
        """Calls a function with the arguments of all replicas, as the outer context does."""
        with enter_replica_context(self.outer):
            return self.outer.merge_call(merge_fn, args, kwargs)


def _find_replica(context: tf.distribute.ReplicaContext) -> int:
    """Returns the index of the replica whose variables a context uses."""
    if isinstance(context, FirstReplica | InnerContext):
        return context.replica
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def find_local_device(strategy: tf.distribute.Strategy) -> int:
    """Returns the index of the calling replica's device among the devices of this process.

    In a function that is shared by all devices, this is the device for which it is traced.
    """
    replica = _find_replica(tf.distribute.get_replica_context())
    return replica % count_local_replicas(strategy)


def is_shared() -> bool:
    """Returns whether the calling function is traced for all devices at once."""
    context = tf.distribute.get_replica_context()
    while isinstance(context, InnerContext):
        if isinstance(context, SharedReplica):
            return True
        context = context.outer
    return False


class NoExchange(InnerContext):
    """A context in which replicas must not exchange values.

    Args:
        outer: the context of the replica
        refuse: raises an error that says why; called when a replica exchanges values
    """

    def __init__(self, outer: tf.distribute.ReplicaContext, refuse: Callable[[], NoReturn]) -> None:
        super().__init__(outer)
        self._refuse = refuse

    @do_not_convert
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PerReplica:
        """Raises an error, because exchanges are not allowed."""
        self._refuse()


class SharedReplica(NoExchange):
    """A context in which a function is traced for all devices at once.

    Variables use the component of the device for which the function is traced.

    Args:
        outer: the context of that device
        index: the index of the replica that calls the function, an int32 scalar
        refuse: raises an error, because replicas exchange values
    """

    def __init__(
        self,
        outer: tf.distribute.ReplicaContext,
        index: tf.Tensor,
        refuse: Callable[[], NoReturn],
    ) -> None:
        super().__init__(outer, refuse)
        self._index = index

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """The index of the replica that calls the function, an int32 scalar."""
        return self._index


class RowWeighted(InnerContext):
    """A context that weights the values of each replica by its number of rows of the batch.

    A replica without rows computes on a placeholder batch, whose values are ignored in exchanges.
    If no replica has rows, all placeholders have the same weight, because a mean over no values
    would be undefined.

    Args:
        outer: the context of the replica
        rows: the number of rows of the replica
        present: whether the replica has rows; None if it always has
        rows_of_all: the total number of rows of all replicas; None if it is always more than 0
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
        name = str(getattr(reduce_op, "value", reduce_op)).upper()
        reduce_op = tf.distribute.ReduceOp(name)
        if reduce_op is tf.distribute.ReduceOp.SUM:
            return self._sum(value, options)
        return tf.nest.map_structure(lambda tensor: self._average(tensor, options), value)

    def _sum(self, value: Structure, options: Options) -> Structure:
        masked = tf.nest.map_structure(self._mask, value)
        return super().all_reduce(tf.distribute.ReduceOp.SUM, masked, options)

    def _average(self, value: Gradient, options: Options) -> tf.Tensor:
        value = tf.convert_to_tensor(value)  # it may be tf.IndexedSlices
        weight = tf.cast(self._rows, value.dtype)
        total, total_weight = self._sum([value * weight, weight], options)
        average: tf.Tensor = total / total_weight
        return average

    def _mask(self, value: Gradient) -> Gradient:
        """Returns the value, or zeros if the replica computes on a placeholder batch."""
        if isinstance(value, tf.IndexedSlices):
            masked = self._mask_tensor(value.values)
            return tf.IndexedSlices(masked, value.indices, value.dense_shape)
        return self._mask_tensor(value)

    def _mask_tensor(self, value: tf.Tensor) -> tf.Tensor:
        if self._present is None:
            return value
        return tf.where(self._present, value, tf.zeros_like(value))

    @do_not_convert
    def all_gather(self, value: Structure, axis: int, options: Options = None) -> Structure:
        """Returns the values of all replicas that have rows, concatenated along an axis.

        On a replica without rows, the result ends with the values of all placeholders, because the
        code of this replica may look up its own values in the result.
        """
        gathered = super().all_gather(value, axis, options)
        present = self._present
        if present is None:
            return gathered

        def cut(tensor: tf.Tensor, gathered: tf.Tensor) -> tf.Tensor:
            own_size = tf.where(present, tf.shape(tensor, tf.int64)[axis], 0)
            real_size = tf.distribute.ReplicaContext.all_reduce(
                self, tf.distribute.ReduceOp.SUM, own_size
            )
            size = tf.shape(gathered, tf.int64)[axis]
            kept = tf.where(present, real_size, size)
            return tf.split(gathered, tf.stack([kept, size - kept]), axis)[0]

        return tf.nest.map_structure(cut, value, gathered)


class LogicalReplica(InnerContext):
    """A context in which a device computes one of its logical replicas.

    Hooks see the index of the logical replica, and the number of logical replicas. Variables use
    the component of the device, which they find by the attribute ``_replica_id``.

    Raises:
        RefusedCall: a replica exchanges values.
    """

    def __init__(self, outer: tf.distribute.ReplicaContext, index: Count, replicas: int) -> None:
        """Creates the context without entering it; see ``enter_logical_replica``."""
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
        """Raises an error, because exchanges are not allowed."""
        raise RefusedCall(f"merge_call {NO_EXCHANGE}")

    @do_not_convert
    def all_reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: Structure, options: Options = None
    ) -> Structure:
        """Raises an error, because exchanges are not allowed."""
        raise RefusedCall(f"all_reduce {NO_EXCHANGE}")

    @do_not_convert
    def all_gather(self, value: Structure, axis: int, options: Options = None) -> Structure:
        """Raises an error, because exchanges are not allowed."""
        raise RefusedCall(f"all_gather {NO_EXCHANGE}")


def enter_logical_replica(index: Count, replicas: int) -> contextlib.AbstractContextManager[None]:
    """Enters a ``LogicalReplica`` context on a device.

    Args:
        index: the index of the logical replica
        replicas: the number of logical replicas
    """
    context = tf.distribute.get_replica_context()
    return enter_replica_context(LogicalReplica(context, index, replicas))


def enter_shared_replica(
    index: tf.Tensor, refuse: Callable[[], NoReturn]
) -> contextlib.AbstractContextManager[None]:
    """Enters a ``SharedReplica`` context with these arguments on a device."""
    context = tf.distribute.get_replica_context()
    return enter_replica_context(SharedReplica(context, index, refuse))


def weigh_by_rows(
    rows: Count | None, present: tf.Tensor | None, rows_of_all: tf.Tensor | None = None
) -> contextlib.AbstractContextManager[None]:
    """Enters a ``RowWeighted`` context with these arguments on a replica.

    Does nothing if all replicas have the same number of rows (``rows`` is None), if there is only
    one replica, or on a logical replica.
    """
    context = tf.distribute.get_replica_context()
    if rows is None or context is None or context.num_replicas_in_sync == 1:
        return contextlib.nullcontext()
    if isinstance(context, LogicalReplica):  # a logical replica exchanges no values
        return contextlib.nullcontext()
    return enter_replica_context(RowWeighted(context, rows, present, rows_of_all))


def forbid_exchanges(refuse: Callable[[], NoReturn]) -> contextlib.AbstractContextManager[None]:
    """Enters a ``NoExchange`` context on a replica; does nothing if there is only one replica."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return contextlib.nullcontext()
    if isinstance(context, LogicalReplica):  # a logical replica rejects exchanges anyway
        return contextlib.nullcontext()
    return enter_replica_context(NoExchange(context, refuse))
