"""Evaluation: each example exactly once, against NumPy, whatever the remainder and replicas."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest

from ctl_core.evaluate import evaluate
from tests.helpers.cases import (
    FEATURES,
    SIZES,
    eval_hooks,
    evaluated_by_hand,
    regression_data,
    set_weights,
)
from tests.helpers.fixtures import Train


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_equals_numpy(train: Train, size: int, replicas: int) -> None:
    state = train(eval_hooks(size), steps=0, batch_size=24, virtual_devices=replicas)
    expected = evaluated_by_hand(size)
    assert state.metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(state.metrics[name], value, rtol=1e-5, err_msg=name)


def test_the_graph_is_traced_once_over_many_evaluations(train: Train) -> None:
    state = train(eval_hooks(23), steps=6, eval_every=1)
    assert state.evaluation is not None
    assert state.evaluation.sets[""].run_steps.experimental_get_tracing_count() == 1  # type: ignore[attr-defined]


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


def test_a_signal_ends_an_evaluation_early(train: Train) -> None:
    state = train(eval_hooks(100), steps=0)
    assert state.evaluation is not None
    one = state.evaluation.sets[""]
    one.data = one.data.dataset.repeat(50)  # type: ignore[assignment]
    assert evaluate(state.evaluation, lambda word: dataclasses.replace(word, signal=15)) is None
    values = evaluate(state.evaluation)
    assert values is not None and values["seen"] == 5000
