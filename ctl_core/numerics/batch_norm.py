"""Batch normalisation on several replicas: one set of moving statistics for all.

Each replica normalises over its own batch, and Keras 3 lets each keep moving statistics of its
own, of which a checkpoint would hold the first replica's. Training does not read them, and they
are linear in those of the batches, so averaging them before they are read, for an evaluation or a
checkpoint, gives what averaging after every step would give, and costs nothing per step. Then
each goes on with its own: when a run was evaluated or saved must not change a bit of it.

Where ``last_batch`` is kept, a replica may have no examples in a step, and its random generators
then fall behind the others'. They, too, are saved for each replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl_core.numerics.staging import ReplicaCopies


def moving_statistics(layers: list[keras.Layer]) -> list[Any]:
    """Returns the variables of the batch normalisations among layers that are moving statistics."""
    return [
        variable.value
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer.non_trainable_variables
        if variable.path.split("/")[-1].startswith(("moving_", "renorm_"))
    ]


class MovingStatistics:
    """The moving statistics of the batch normalisations among the layers of a run."""

    def __init__(
        self, layers: list[keras.Layer], strategy: tf.distribute.Strategy, others: Sequence[Any]
    ) -> None:
        """``others`` may differ between replicas, too, and are not averaged."""
        self._strategy = strategy
        several = strategy.num_replicas_in_sync > 1
        self._statistics = moving_statistics(layers) if several else []
        known = set(map(id, self._statistics))
        more = [variable for variable in others if several and id(variable) not in known]
        self._copies = ReplicaCopies(strategy, [*self._statistics, *more])
        self._more = set(map(id, more))
        self._are_back = False
        self._average: Any = None

    def average(self) -> None:
        """Gives each replica the mean over all replicas.

        Every process of a cluster must call it.
        """
        if not self._statistics:
            return
        if self._average is None:
            self._average = self._trace()
        self._average()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives each replica the mean while something reads it, and then its own back.

        Every process of a cluster must enter it.
        """
        with self._copies.put_back_after():
            self.average()
            yield

    @property
    def own(self) -> tf.train.Checkpoint | None:
        """What this process's replicas had before the mean, to be saved; None if it is the same."""
        return tf.train.Checkpoint(own=self._copies.own) if self._copies.own else None

    def put_back(self) -> None:
        """Gives this process's replicas what ``own`` holds, after a restore."""
        self._copies.put_back()
        self._are_back = True

    def not_back(self, variables: list[Any]) -> list[Any]:
        """Returns those of the variables whose values on each replica were not put back."""
        return [v for v in variables if not (self._are_back and id(v) in self._more)]

    def _trace(self) -> Any:
        def on_replica() -> None:
            context = tf.distribute.get_replica_context()
            values = [statistic.read_value() for statistic in self._statistics]
            means = context.all_reduce(tf.distribute.ReduceOp.MEAN, values)
            for statistic, mean in zip(self._statistics, means, strict=True):
                statistic.assign(mean)

        @tf.function(autograph=False)
        def average() -> None:
            self._strategy.run(on_replica)

        return average
