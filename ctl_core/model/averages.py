"""Finds moving statistics, and averages weights over the steps."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from ctl_core.model.copies import define_copy, list_local_components
from ctl_core.model.shards import Shards
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


class WeightAverage:
    """Keeps an average of each weight: ``average = decay * average + (1 - decay) * weight``.

    The initial value of each average is the weight itself. For an evaluation, the values of weights
    and averages are swapped, so the evaluated code does not need to know about averages.

    Attributes:
        begin: a function that sets the averages to the current weights
        swap: a function that swaps the values of averages and weights
    """

    def __init__(
        self,
        decay: float,
        weights: list[Variable],
        strategy: tf.distribute.Strategy,
        shards: Shards | None = None,
    ) -> None:
        """Creates the averages. Must be called in the strategy's scope.

        Args:
            decay: the decay
            weights: the weights to average
            strategy: the strategy of the weights
            shards: the owners of the weights, each of which has the only average of its weights;
                None if each device has all averages
        """
        self._decay = decay
        self._weights = [unwrap(weight) for weight in weights]
        self._averages: list[tf.Variable] = []
        self._shards = shards
        for weight in weights:
            with contextlib.nullcontext() if shards is None else shards.place(weight):
                initial = keras.ops.convert_to_numpy(weight)
                self._averages.append(tf.Variable(initial, trainable=False))
        local_averages = list_local_components(strategy, self._averages)
        if shards is None:
            local_weights = list_local_components(strategy, self._weights)
            self.begin = define_copy(local_weights, local_averages)
            self.swap = define_copy(local_weights + local_averages, local_averages + local_weights)
        else:
            of_owners = [shards.find_component(weight) for weight in self._weights]
            self.begin = define_copy(of_owners, local_averages)
            swap = define_copy(of_owners + local_averages, local_averages + of_owners)
            copy_from_owners = tf.function(shards.copy_from_owners, autograph=False)
            copy = copy_from_owners.get_concrete_function(self._weights)

            def swap_and_copy() -> None:
                swap()
                copy()

            self.swap = swap_and_copy

    def update(self, device: int) -> None:
        """Updates the averages after a step. Runs in a graph, on each replica separately.

        Args:
            device: the index of the replica's device among those of this process
        """
        for average, weight in zip(self._averages, self._weights, strict=True):
            if self._shards is None or self._shards.owns(weight, device):
                average.assign(self._decay * average + (1 - self._decay) * weight)

    @contextlib.contextmanager
    def replace_weights(self) -> Iterator[None]:
        """Replaces the weights with their averages inside the context."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
