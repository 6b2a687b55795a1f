"""Hooks may be functions, methods, objects or partials of any kind; each is traced as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tests.helpers.cases import assert_weights, make_hooks, sliced
from tests.helpers.fixtures import Train


def doubled(batch: Any, factor: float = 2.0) -> Any:
    """An input_pre with a default argument and an ``if`` that only AutoGraph can trace."""
    inputs = batch[0]
    if tf.reduce_sum(inputs**2) > 0.0:
        inputs = inputs * factor
    return inputs


class Doubler:
    """Hooks that are a callable object and methods."""

    factor = 2.0

    def __call__(self, batch: Any) -> Any:
        return doubled(batch, self.factor)

    @classmethod
    def of_class(cls, batch: Any) -> Any:
        return doubled(batch, cls.factor)


@functools.wraps(doubled)
def halved_first(batch: Any) -> Any:
    """A decorator's work, which must not get lost."""
    return doubled((batch[0] / 2.0, batch[1]), 4.0)


KINDS: dict[str, Callable[..., Any]] = {
    "function": doubled,
    "keyword only": lambda *, batch: doubled(batch),
    "partial": functools.partial(doubled, factor=2.0),
    "tf.function": tf.function(doubled),
    "object": Doubler(),
    "class method": Doubler.of_class,
    "partial of a method": functools.partial(Doubler().__call__),
    "decorated": halved_first,
}


def test_graph_hooks_of_any_kind(train: Train) -> None:
    inputs, target = make_hooks().create_dataset(100).get_single_element()
    expected = train(make_hooks(create_dataset=sliced((2.0 * inputs, target))), steps=3)
    for kind, hook in KINDS.items():
        state = train(make_hooks(input_pre=hook), steps=3, run_name=kind.replace(" ", "-"))
        assert_weights(state, expected)


class Descent:
    """An optimizer that is an object of one's own, which TensorFlow does not track."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.steps = tf.Variable(0, trainable=False)

    def apply_gradients(self, pairs: Any) -> None:
        """Takes a step of gradient descent."""
        self.steps.assign_add(1)
        for gradient, variable in pairs:
            variable.assign_sub(self.rate * gradient)


def test_an_optimizer_of_ones_own_is_saved(train: Train) -> None:
    expected = train(make_hooks(create_opt=lambda: keras.optimizers.SGD(0.1)), steps=4)
    hooks = make_hooks(create_opt=lambda: Descent(0.1))
    for steps in (2, 4):
        state = train(hooks, steps=steps, run_name="own")
    assert_weights(state, expected)
    assert int(state.optimizer.steps) == 4
