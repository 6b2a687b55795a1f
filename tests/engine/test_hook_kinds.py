"""Hooks may be functions, methods, objects or partials of any kind; each is traced as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
