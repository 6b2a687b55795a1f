"""Averages: of moving statistics over the replicas, and of weights over the steps.

Each replica keeps the moving statistics of its own batches. Training does not read them, and they
depend linearly on the statistics of the batches. So it is enough to average them before an
evaluation or a checkpoint reads them: the result is that of averaging after every step, and steps
cost nothing. Afterwards each replica gets its own statistics back, because a run must not depend on
when it was evaluated or saved.
"""

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from ctl_core.model.copies import ReplicaCopies, define_copy, list_local_components
from ctl_core.numerics.variables import unwrap
from ctl_core.types import Variable


def find_moving_statistics(layers: list[keras.Layer]) -> list[tf.Variable]:
    """Returns the moving statistics of the batch normalizations among the layers."""
    return [
        variable.value
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer.non_trainable_variables
        if variable.path.split("/")[-1].startswith(("moving_", "renorm_"))
    ]


def has_own_statistics(layer: keras.Layer) -> bool:
    """Returns whether each replica normalizes its share of a batch by itself in this layer."""
    if not isinstance(layer, keras.layers.BatchNormalization):
        return False
    return bool(layer.trainable and not layer.synchronized)


class MovingStatistics:
    """The moving statistics of the batch normalizations among the layers of a run.

    Attributes:
        copies: the values of each replica, copied while the averages are in their place
    """

    def __init__(
        self,
        layers: list[keras.Layer],
        strategy: tf.distribute.Strategy,
        others: Sequence[tf.Variable],
    ) -> None:
        """Prepares the averages; on a single replica, there is nothing to average or to copy.

        Args:
            layers: the layers of the run
            strategy: whose replicas train
            others: variables that may differ between replicas, too. They are not averaged, but
                copied: a replica that had no examples in a step has drawn fewer random numbers.
        """
        self._strategy = strategy
        self._statistics: list[tf.Variable] = []
        copied: dict[int, tf.Variable] = {}
        if strategy.num_replicas_in_sync > 1:
            self._statistics = find_moving_statistics(layers)
            copied = {id(variable): variable for variable in (*self._statistics, *others)}
        self.copies = ReplicaCopies(strategy, list(copied.values()))
        self._average_on_replicas = tf.function(self._run_average, autograph=False)

    def _run_average(self) -> None:
        self._strategy.run(self._average_on_replica)

    def _average_on_replica(self) -> None:
        context = tf.distribute.get_replica_context()
        values = [statistic.read_value() for statistic in self._statistics]
        means = context.all_reduce(tf.distribute.ReduceOp.MEAN, values)
        for statistic, mean in zip(self._statistics, means, strict=True):
            statistic.assign(mean)

    def average(self) -> None:
        """Gives each replica the mean over all replicas; every process of a cluster calls it."""
        if self._statistics:
            self._average_on_replicas()

    @contextlib.contextmanager
    def hold_averages(self) -> Iterator[None]:
        """Gives each replica the mean while something reads it, and then its own values back."""
        with contextlib.ExitStack() as stack:
            if self.copies.values:
                stack.enter_context(self.copies.put_back_after())
            self.average()
            yield

    @property
    def checkpoint(self) -> tf.train.Checkpoint | None:
        """The copied values of this process's replicas, to be saved; None if there are none."""
        if not self.copies.values:
            return None
        return tf.train.Checkpoint(own=self.copies.values)  # saved checkpoints have this name


class WeightAverage:
    """An average for each weight: ``average = decay * average + (1 - decay) * weight``.

    It begins with the weights themselves. Averages and weights are exchanged for an evaluation, so
    that nothing that is evaluated has to know of averages.

    Attributes:
        begin: starts the averages again with the present weights
        swap: exchanges averages and weights
    """

    def __init__(
        self, decay: float, weights: list[Variable], strategy: tf.distribute.Strategy
    ) -> None:
        """Creates the averages; has to be called in the strategy's scope."""
        self._decay = decay
        self._weights = [unwrap(weight) for weight in weights]
        self._averages = [
            tf.Variable(keras.ops.convert_to_numpy(weight), trainable=False) for weight in weights
        ]
        local_averages = list_local_components(strategy, self._averages)
        local_weights = list_local_components(strategy, self._weights)
        self.begin = define_copy(local_weights, local_averages)
        self.swap = define_copy(local_weights + local_averages, local_averages + local_weights)

    def update(self) -> None:
        """Updates the averages after a step; runs in a graph, on each replica with its values."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.assign(self._decay * average + (1 - self._decay) * weight)

    @contextlib.contextmanager
    def replace_weights(self) -> Iterator[None]:
        """Gives the weights the averaged values inside the context."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
