"""A graph to call hooks in without running anything: their variables, shapes and mistakes show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ctl_core.checks.writes import same_on_all_replicas
from ctl_core.cluster.strategy import distribute, local_replicas
from ctl_core.cluster.task import Task
from ctl_core.compat import scratch_graph
from ctl_core.inputs import Input


def placeholders(element_spec: Any) -> Any:
    """Returns a batch of a specification that has no values, in a graph."""
    return tf.nest.map_structure(
        lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape),
        element_spec,
        expand_composites=True,
    )


@contextlib.contextmanager
def scratch(data: Input, task: Task) -> Iterator[Any]:
    """A graph, on this process's first replica, to call hooks in without running anything.

    Variables made in it exist outside of it. In a tf.function, random generators could not be made
    on several replicas.
    """
    first = task.index * data.replicas
    with scratch_graph("build").as_default() as graph, Alone(data.strategy, first):
        yield graph


class Alone(tf.distribute.ReplicaContext):
    """A replica that meets no other: what is exchanged has the right shapes and no values."""

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function as if every replica of this process gave the same."""

        def merge(strategy: tf.distribute.Strategy, args: Any, kwargs: Any) -> Any:
            def of_all(part: Any) -> Any:
                if not isinstance(part, tf.Tensor | tf.IndexedSlices):
                    return part
                return distribute(strategy, [part] * local_replicas(strategy))

            args, kwargs = tf.nest.map_structure(of_all, (args, kwargs))
            merged = merge_fn(strategy, *args, **kwargs)
            return tf.nest.map_structure(
                lambda part: strategy.experimental_local_results(part)[0], merged
            )

        return super().merge_call(merge, (args, kwargs or {}))

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns the value as it is."""
        return same_on_all_replicas(value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Returns the value once for each replica."""
        replicas = self.strategy.num_replicas_in_sync
        gathered = tf.nest.map_structure(lambda part: tf.concat([part] * replicas, axis), value)
        return same_on_all_replicas(gathered)
