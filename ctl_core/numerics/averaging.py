"""The moving average of the weights (``ema``): kept up by each step, used by evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.numerics.replicas import define_copy
from ctl_core.numerics.variables import plain_variable


class WeightAverage:
    """An average for each weight: ``average = decay * average + (1 - decay) * weight``.

    It begins with the weights themselves. Its values and those of the weights are exchanged for an
    evaluation, so that whatever is evaluated need not know of it.

    Attributes:
        begin: begins anew with the present weights
        swap: exchanges averages and weights
    """

    def __init__(self, decay: float, weights: list[Any], strategy: tf.distribute.Strategy) -> None:
        """Makes the averages; called in the strategy's scope."""
        self._decay = decay
        self._weights = [plain_variable(weight) for weight in weights]
        self._averages = [
            tf.Variable(keras.ops.convert_to_numpy(weight), trainable=False) for weight in weights
        ]
        local = strategy.experimental_local_results
        own = [part for average in self._averages for part in local(average)]
        here = [part for weight in self._weights for part in local(weight)]
        self.begin = define_copy(here, own)
        self.swap = define_copy([*here, *own], [*own, *here])

    def update(self) -> None:
        """Takes one step; runs in a graph, for each replica with its own values."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.assign(self._decay * average + (1 - self._decay) * weight)

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Within, the weights have the averaged values."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
