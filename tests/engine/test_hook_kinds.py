"""Hooks may be functions, methods, objects or partials of any kind; each is traced as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import make_hooks, sliced
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

    def method(self, batch: Any) -> Any:
        inputs = batch[0]
        if tf.reduce_sum(inputs**2) > 0.0:
            inputs = inputs * self.factor
        return inputs

    @classmethod
    def of_class(cls, batch: Any) -> Any:
        return doubled(batch, cls.factor)

    @staticmethod
    def static(batch: Any) -> Any:
        return doubled(batch)


def halved_first(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator whose work must not get lost."""

    @functools.wraps(hook)
    def wrapper(batch: Any) -> Any:
        return hook(batch=(batch[0] / 2.0, batch[1]))

    return wrapper


def quadrupled(batch: Any) -> Any:
    return doubled(batch, 4.0)


KINDS: dict[str, Callable[..., Any]] = {
    "function": doubled,
    "lambda": lambda batch: doubled(batch),
    "keyword only": lambda *, batch: doubled(batch),
    "partial": functools.partial(doubled, factor=2.0),
    "tf.function": tf.function(doubled),
    "object": Doubler(),
    "method": Doubler().method,
    "class method": Doubler.of_class,
    "static method": Doubler.static,
    "partial of a method": functools.partial(Doubler().method),
    "decorated": halved_first(quadrupled),
}


@pytest.fixture(scope="module")
def trained_on_doubled_inputs(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """The weights after the doubling is done in the data."""
    inputs, target = make_hooks().create_dataset(100).get_single_element()
    hooks = make_hooks(create_dataset=sliced((2.0 * inputs, target)))
    folder = str(tmp_path_factory.mktemp("doubled"))
    config = ctl_core.Config(steps=3, batch_size=16, learning_rate=0.01, runs_dir=folder)
    return ctl_core.train(hooks, config).train_model.get_weights()


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_hook_of_any_kind(
    train: Train, trained_on_doubled_inputs: list[np.ndarray], kind: str
) -> None:
    weights = train(make_hooks(input_pre=KINDS[kind]), steps=3).train_model.get_weights()
    for one, other in zip(weights, trained_on_doubled_inputs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
