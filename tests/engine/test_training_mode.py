"""Layers inside functions that hooks return: in training as in training, elsewhere never."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.commands import use
from tests.helpers.cases import (
    FEATURES,
    make_hooks,
    norm_model,
    regression_data,
    sgd,
    sliced,
    unclipped,
)
from tests.helpers.fixtures import Train

X, Y = regression_data()
EVALUATED = 32  # batches of the shape that training has, for which tf.functions are traced


class Noise(keras.layers.Layer):
    """Like random augmentation, it is on unless it is told, and shows by how much it was."""

    def call(self, inputs: Any, training: bool = True) -> Any:
        return inputs * (1.5 if training else 1.0)


def noisy() -> keras.Model:
    """Layers that are on by default, off by default, and that have statistics."""
    model = norm_model()
    return keras.Sequential([keras.Input((FEATURES,)), Noise(), *model.layers])


def hooks(**own: Any) -> SimpleNamespace:
    return make_hooks(
        create_opt=sgd,
        update_pre=unclipped,
        create_eval_dataset=sliced((X[:EVALUATED], Y[:EVALUATED])),
        create_metrics=lambda: {"mean": keras.metrics.Mean()},
        **{"metric_pre": lambda output: (output,), **own},
    )


def by_hand(net: keras.Model) -> np.ndarray:
    return np.asarray(net(X[:EVALUATED], training=False))


def assert_evaluates(values: dict[str, float], net: keras.Model) -> None:
    found = by_hand(net)
    error = ((found - Y[:EVALUATED]) ** 2).mean()
    assert values["loss"] == pytest.approx(error, rel=1e-5)
    assert values["mean"] == pytest.approx(found.mean(), rel=1e-5)


def test_a_function_around_the_model_is_evaluated_predicted_and_exported_without_noise(
    train: Train,
) -> None:
    """So are layers in the hooks around the model, which are as in Keras while it trains."""
    augment, extra = Noise(), Noise()
    own = hooks(
        create_model=noisy,
        create_eval_model=lambda train_model: lambda inputs: train_model(inputs),
        input_pre=lambda batch: augment(batch[0]),
        loss_pre=lambda output, batch: (extra(output), batch[1]),
        metric_pre=lambda output: (extra(output),),
    )
    state = train(own, steps=3, virtual_devices=2)
    net = state.train_model
    assert_evaluates(state.metrics, net)
    served = ctl_core.load(state.run_dir, callbacks=own)
    np.testing.assert_allclose(served(X[:EVALUATED]), by_hand(net), rtol=1e-5, atol=1e-6)

    def doubled(model: Any) -> Any:
        return tf.function(lambda inputs: 2.0 * model(inputs))

    own.create_inference_model = doubled
    own.serve = lambda inputs: augment(inputs)
    config = state.config
    with np.load(use.predict(own, config)) as file:
        predicted = file["output"]
    np.testing.assert_allclose(predicted, 2.0 * by_hand(net), rtol=1e-5, atol=1e-6)
    exported = tf.saved_model.load(str(use.export(own, config)))
    np.testing.assert_allclose(exported.serve(X[:EVALUATED]), predicted, rtol=1e-5, atol=1e-6)
