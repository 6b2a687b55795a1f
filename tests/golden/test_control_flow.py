"""Python's ``if`` and ``for`` over tensors work in all functions that a graph calls."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.reference import Reference


class Shrunk:
    """A model that is a plain object, and shrinks its output step by step."""

    def __init__(self) -> None:
        self.net = small.create_model()

    def __call__(self, inputs: Any) -> Any:
        return shrink(self.net(inputs))


def shrink(values: Any) -> Any:
    if tf.reduce_max(tf.abs(values)) > 0.0:
        values = 0.5 * values
    for number in tf.range(3):
        values *= 1.0 - 0.1 * tf.cast(number, tf.float32)
    return values


class ShrunkError:
    """A loss that is a plain object."""

    def __call__(self, pair: Any) -> Any:
        return shrink(small.squared_error(pair))


def shrink_example(inputs: Any, target: Any) -> Any:
    if inputs[0] > 0.0:
        inputs = 0.5 * inputs
    return inputs, target


def shrunk_dataset(examples: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(small.data(examples)).map(shrink_example)


@pytest.mark.parametrize("devices", [1, 3])
def test_models_and_losses_that_are_functions(train_small: engine.Train, devices: int) -> None:
    hooks = small.hooks(create_model=Shrunk, create_loss=ShrunkError)
    state = train_small(hooks, virtual_devices=devices)
    plain = Reference(hooks).train(
        small.create_dataset(small.BATCH).take(6), lambda parts: parts.train_model.net.weights
    )
    compare.assert_close(state.train_model.net.weights, plain.parts.train_model.net.weights)


def test_a_run_is_loaded_as_it_was_trained(train_small: engine.Train) -> None:
    def create_inference_model(model: Any) -> Any:
        return lambda inputs: shrink(model(inputs))

    hooks = small.hooks(
        create_dataset=lambda global_batch_size: shrunk_dataset(96).batch(global_batch_size),
        create_eval_dataset=lambda global_batch_size: shrunk_dataset(37).batch(global_batch_size),
        create_eval_model=lambda train_model: lambda inputs: shrink(train_model(inputs)),
        create_inference_model=create_inference_model,
    )
    state = train_small(hooks)
    inputs, _ = small.data(37)
    plain = small.plain(6, batches=shrunk_dataset(96).batch(small.BATCH))
    evaluated = [shrink(plain(rows)) - targets for rows, targets in shrunk_dataset(37).batch(37)]
    assert state.metrics["loss"] == pytest.approx(float(np.mean(evaluated[0] ** 2)), rel=1e-5)
    loaded = ctl_core.load(state.run_dir, callbacks=hooks)
    np.testing.assert_allclose(loaded(inputs), shrink(shrink(plain(inputs))), 1e-5, 1e-6)
