"""The moving average of the weights (``ema``): kept up by each step, used by evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.model.variables import plain_variable


class WeightAverage(tf.Module):
    """An average for each weight: ``average = decay * average + (1 - decay) * weight``.

    It begins with the weights themselves. Its values and those of the weights are exchanged for an
    evaluation, so that whatever is evaluated need not know of it.
    """

    def __init__(self, decay: float, weights: list[Any], strategy: tf.distribute.Strategy) -> None:
        """Makes the averages; called in the strategy's scope."""
        super().__init__(name="ema")
        self._decay = decay
        self._strategy = strategy
        # A tuple in a lambda is nothing that is followed: the weights are the model's.
        plain = tuple(map(plain_variable, weights))
        self._weights: Callable[[], tuple[Any, ...]] = lambda: plain
        self.averages = [
            tf.Variable(keras.ops.convert_to_numpy(weight), trainable=False) for weight in weights
        ]
        self._moves: dict[str, Any] = {}

    def update(self) -> None:
        """Takes one step; runs in a graph, for each replica with its own values."""
        for average, weight in zip(self.averages, self._weights(), strict=True):
            average.assign(self._decay * average + (1 - self._decay) * weight)

    def begin(self) -> None:
        """Begins anew with the present weights."""
        self._move("begin")

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Within, the weights have the averaged values."""
        self._move("swap")
        try:
            yield
        finally:
            self._move("swap")

    def put_in(self) -> None:
        """Gives the weights the averaged values, for good."""
        self._move("swap")

    def _move(self, how: str) -> None:
        if how not in self._moves:
            results = self._strategy.experimental_local_results

            @tf.function(autograph=False)
            def move() -> None:
                for average, weight in zip(self.averages, self._weights(), strict=True):
                    for own, here in zip(results(average), results(weight), strict=True):
                        with tf.device(here.device):
                            before, after = here.read_value(), own.read_value()
                            own.assign(before)
                            if how == "swap":
                                here.assign(after)

            self._moves[how] = move
        self._moves[how]()
