"""Averages moving statistics over the replicas, and weights over the steps.

Each replica keeps the moving statistics of its own batches. Training does not read them, and they
depend linearly on the statistics of the batches. It is therefore enough to average them before an
evaluation or a checkpoint reads them: the result equals that of averaging after every step, and
training steps cost nothing extra. Afterwards, each replica gets its own statistics back, because
the result of a run must not depend on when the run was evaluated or saved.
"""

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from ctl_core.cluster.exchange import reduce_by_dtype
from ctl_core.model.copies import ReplicaCopies, define_copy, list_local_components
from ctl_core.numerics.variables import unwrap
from ctl_core.types import Variable


def find_moving_statistics(layers: list[keras.Layer]) -> list[tf.Variable]:
    """Returns the moving statistics of all BatchNormalization layers in a list of layers."""
    return [
        variable.value
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer.non_trainable_variables
        if variable.path.split("/")[-1].startswith(("moving_", "renorm_"))
    ]


def has_own_statistics(layer: keras.Layer) -> bool:
    """Returns whether a layer normalizes the share of each replica separately.

    This is the case for a trainable BatchNormalization layer that is not synchronized.
    """
    if not isinstance(layer, keras.layers.BatchNormalization):
        return False
    return bool(layer.trainable and not layer.synchronized)


class MovingStatistics:
    """Averages the moving statistics of a run's BatchNormalization layers over the replicas.

    Attributes:
        copies: copies of each replica's own values, which are restored after the averages were read
    """

    def __init__(
        self,
        layers: list[keras.Layer],
        strategy: tf.distribute.Strategy,
        others: Sequence[tf.Variable],
    ) -> None:
        """Prepares the averages. On a single replica, there is nothing to average or to copy.

        Args:
            layers: the layers of the run
            strategy: the strategy whose replicas train
            others: other variables that may differ between replicas, such as the states of random
                generators: a replica that had no examples in a step has drawn fewer random numbers.
                These variables are copied, but not averaged.
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
        values = [statistic.read_value() for statistic in self._statistics]
        context = tf.distribute.get_replica_context()
        means = reduce_by_dtype(context, tf.distribute.ReduceOp.MEAN, values)
        for statistic, mean in zip(self._statistics, means, strict=True):
            statistic.assign(mean)

    def average(self) -> None:
        """Sets the statistics of each replica to their mean over all replicas.

        In a cluster, every process has to call this method.
        """
        if self._statistics:
            self._average_on_replicas()

    @contextlib.contextmanager
    def hold_averages(self) -> Iterator[None]:
        """Sets the statistics to their means inside the context.

        When the context ends, each replica gets its own statistics back.
        """
        with contextlib.ExitStack() as stack:
            if self.copies.values:
                stack.enter_context(self.copies.put_back_after())
            self.average()
            yield

    @property
    def checkpoint(self) -> tf.train.Checkpoint | None:
        """A checkpoint of the values copied on this process; None if nothing is copied."""
        if not self.copies.values:
            return None
        return tf.train.Checkpoint(own=self.copies.values)  # existing checkpoints contain this name


class WeightAverage:
    """Keeps an average of each weight: ``average = decay * average + (1 - decay) * weight``.

    The initial value of each average is the weight itself. For an evaluation, the values of weights
    and averages are swapped, so the evaluated code does not need to know about averages.

    Attributes:
        begin: a function that sets the averages to the current weights
        swap: a function that swaps the values of averages and weights
    """

    def __init__(
        self, decay: float, weights: list[Variable], strategy: tf.distribute.Strategy
    ) -> None:
        """Creates the averages. Must be called in the strategy's scope."""
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
        """Updates the averages after a step. Runs in a graph, on each replica separately."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.assign(self._decay * average + (1 - self._decay) * weight)

    @contextlib.contextmanager
    def replace_weights(self) -> Iterator[None]:
        """Replaces the weights with their averages inside the context."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
