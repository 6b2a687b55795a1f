"""Batch normalisation on several replicas: one set of moving statistics for all.

Each replica normalises over its own batch, and Keras 3 lets each keep moving statistics of its
own, of which a checkpoint would hold the first replica's. Training does not read them, and they
are linear in those of the batches, so averaging them before they are read, for an evaluation or a
checkpoint, gives what averaging after every step would give, and costs nothing per step.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ctl_core.freezing import layers_of


class MovingStatistics:
    """The moving statistics of a model's batch normalisations.

    Attributes:
        averaged_at: the step after which they were last made equal, or -1
    """

    def __init__(self, model: Any, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._model = model
        self.averaged_at = -1
        self._average: Any = None

    def average(self, step: int) -> None:
        """Gives each replica the mean over all replicas, once for a step.

        Every process of a cluster must call it.
        """
        if self._strategy.num_replicas_in_sync == 1 or self.averaged_at == step:
            return
        if self._average is None:
            self._average = self._trace()
        self._average()
        self.averaged_at = step

    def _trace(self) -> Any:
        statistics = [
            variable.value
            for layer in layers_of(self._model)
            if isinstance(layer, keras.layers.BatchNormalization)
            for variable in layer.non_trainable_variables
            if variable.path.split("/")[-1].startswith(("moving_", "renorm_"))
        ]

        def on_replica() -> None:
            if not statistics:
                return
            context = tf.distribute.get_replica_context()
            values = [statistic.read_value() for statistic in statistics]
            means = context.all_reduce(tf.distribute.ReduceOp.MEAN, values)
            for statistic, mean in zip(statistics, means, strict=True):
                statistic.assign(mean)

        @tf.function(autograph=False)
        def average() -> None:
            self._strategy.run(on_replica)

        return average
