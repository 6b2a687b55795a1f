"""Evaluation: each example exactly once, against NumPy, whatever the remainder and replicas."""

from __future__ import annotations

import keras
import numpy as np

from tests.helpers.cases import (
    FEATURES,
    eval_hooks,
    regression_data,
    set_weights,
)
from tests.helpers.fixtures import Train


def test_eval_pre_and_regularisation(train: Train) -> None:
    regular = keras.regularizers.L2(0.1)

    def create_model() -> keras.Model:
        layer = keras.layers.Dense(1, kernel_regularizer=regular)
        return set_weights(keras.Sequential([keras.Input((FEATURES,)), layer]))

    model = create_model()
    inputs, target = (part[:23] for part in regression_data())
    plain = ((model(inputs).numpy() - target) ** 2).mean()
    penalty = 0.1 * (model.get_weights()[0] ** 2).sum()
    with_penalty = train(eval_hooks(23, create_model=create_model), steps=0, virtual_devices=2)
    np.testing.assert_allclose(with_penalty.metrics["loss"], plain + penalty, rtol=1e-5)
    hooks = eval_hooks(23, create_model=create_model, eval_pre=lambda loss: (3 * loss, 0.0))
    tripled = train(hooks, steps=0, run_name="tripled")
    np.testing.assert_allclose(tripled.metrics["loss"], 3 * plain, rtol=1e-5)
