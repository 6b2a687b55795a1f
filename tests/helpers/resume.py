"""Comparing a run in one go with the same run in two parts, in all that its objects reach."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden import small
from tests.helpers.cases import FEATURES
from tests.helpers.fixtures import Train


def values(state: ctl_core.State) -> dict[str, np.ndarray]:
    """Everything that is recorded, as it is on the first replica and in sum."""
    read = state.strategy.experimental_local_results
    numbers = {}
    for path, variable in state.recording.variables.items():
        numbers[path] = np.sum([part.numpy() for part in read(variable)], axis=0)
    return numbers


def assert_resumes(
    train: Train, program: Callable[[], SimpleNamespace], replicas: int = 1, **settings: Any
) -> dict[str, np.ndarray]:
    """Compares 12 steps in one go with 5 and 7, each by objects made anew; returns the former."""
    settings = {"virtual_devices": replicas, **settings}
    whole = values(train(program(), steps=12, run_name="whole", **settings))
    train(program(), steps=5, run_name="parts", **settings)
    parts = values(train(program(), steps=12, run_name="parts", **settings))
    assert whole.keys() == parts.keys()
    for path, value in whole.items():
        np.testing.assert_array_equal(value, parts[path], err_msg=path)
    return whole


def dense(units: int, inputs: int = FEATURES, seed: int = 0) -> keras.layers.Dense:
    layer = keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed))
    layer.build((None, inputs))
    return layer


class Counting(keras.layers.Layer):
    """Counts its calls, with a variable made by hand, and keeps a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, inputs: Any) -> Any:
        self.calls.assign(self.calls + 1)
        self.seen.update_state(tf.ones(tf.shape(inputs)[0]))
        return inputs


def counting_model() -> keras.Model:
    return small.model_with(Counting(), keras.layers.BatchNormalization())


def seeded(create: Callable[[], Any]) -> Callable[[], Any]:
    def create_model() -> Any:
        keras.utils.set_random_seed(1)
        return create()

    return create_model


class StatefulRnn(keras.Model):
    """A recurrent network that goes on where the last batch ended, and counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = keras.layers.SimpleRNN(4, stateful=True, seed=1)
        self.rnn.build((16, FEATURES, 1))
        self.count, self.out = Counting(), dense(1, 4)

    def call(self, inputs: Any) -> Any:
        return self.out(self.rnn(self.count(inputs)[:, :, None]))
