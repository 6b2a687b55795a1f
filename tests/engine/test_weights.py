"""What the loss is divided by, and sample weights: as a plain loop and Keras fit have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import (
    assert_weights,
    make_hooks,
    regression_data,
    sgd,
    sliced,
    small_model,
    unclipped,
)
from tests.helpers.fixtures import Train

BATCH, STEPS, RATE = 8, 6, 0.1

# ---- batch_weight ------------------------------------------------------------------------------


def test_what_is_no_weight_is_refused(train: Train) -> None:
    message = r"^batch_weight \(test_weights.py:\d+\): returned float32\[8\], expected how much a b"
    with pytest.raises(ctl_core.SetupError, match=message):
        hooks = make_hooks(batch_weight=lambda batch: tf.ones_like(batch[1][:, 0]))
        train(hooks, steps=1, batch_size=BATCH)


@pytest.mark.parametrize("settings", [{"virtual_devices": 2}, {"accumulate_steps": 2}], ids=str)
def test_a_step_that_weighs_nothing_changes_nothing(train: Train, settings: Any) -> None:
    inputs, target = (part.copy() for part in regression_data())
    target[40:48] = 99.0  # of the sixth step
    hooks = make_hooks(
        create_dataset=sliced((inputs, target)),
        create_opt=sgd,
        batch_weight=lambda batch: tf.where(tf.reduce_min(batch[1]) > 50.0, 0.0, 4.0),
    )
    five, six = (
        train(hooks, steps=steps, batch_size=BATCH, run_name=str(steps), **settings)
        for steps in (5, 6)
    )
    assert_weights(six, five, rtol=0)


def test_a_negative_weight_makes_the_loss_nan(train: Train) -> None:
    hooks = make_hooks(batch_weight=lambda batch: -1.0)
    with pytest.raises(ctl_core.RunError, match="the loss of step 1 is not finite"):
        train(hooks, steps=2, batch_size=BATCH, on_nan="stop")


# ---- Sample weights: (x, y, w) batches, as Keras has them -------------------------------------

EXAMPLE_WEIGHTS = np.random.default_rng(5).uniform(0.0, 3.0, 48)  # float64, as NumPy makes them


def mean_squared_error() -> Any:
    loss = keras.losses.MeanSquaredError(reduction="none")
    return lambda pair: loss(pair[1], pair[0])


def weighted_hooks(weight: Any = EXAMPLE_WEIGHTS, **hooks: Any) -> SimpleNamespace:
    inputs, target = (part[:48] for part in regression_data())
    base = {
        "create_dataset": sliced((inputs, target, weight)),
        "create_eval_dataset": lambda per_replica_batch_size: tf.data.Dataset.from_tensor_slices(
            (inputs[:23], target[:23], weight[:23])
        ).batch(per_replica_batch_size),
        "create_loss": mean_squared_error,
        "create_opt": sgd,
        "update_pre": unclipped,
        "create_metrics": lambda: {"error": keras.metrics.MeanAbsoluteError()},
    }
    return make_hooks(**{**base, **hooks})


@pytest.mark.parametrize(("devices", "column"), [(1, False), (2, True)])
def test_sample_weights_are_those_of_keras_fit(train: Train, devices: int, column: bool) -> None:
    weight = EXAMPLE_WEIGHTS[:, None] if column else EXAMPLE_WEIGHTS
    state = train(
        weighted_hooks(weight), steps=STEPS, batch_size=BATCH, learning_rate=RATE,
        virtual_devices=devices,
    )  # fmt: skip
    inputs, target = (part[:48] for part in regression_data())
    model = small_model()
    model.compile(
        keras.optimizers.SGD(RATE), "mse", weighted_metrics=[keras.metrics.MeanAbsoluteError()]
    )
    model.fit(inputs, target, BATCH, sample_weight=EXAMPLE_WEIGHTS, shuffle=False, verbose=0)
    assert_weights(state, model.get_weights(), rtol=1e-5)
    found = model.evaluate(
        inputs[:23], target[:23], BATCH, sample_weight=EXAMPLE_WEIGHTS[:23], verbose=0
    )
    np.testing.assert_allclose([state.metrics["loss"], state.metrics["error"]], found, rtol=1e-5)


THIRD = "the third element of a batch means sample weights, floating-point numbers of shape"
NO_SAMPLE_WEIGHTS: dict[str, tuple[SimpleNamespace, str]] = {
    "numbers of the examples": (weighted_hooks(np.arange(48)), rf"^input_pre .*{THIRD}"),
    "four elements": (
        make_hooks(create_dataset=sliced((*regression_data(), *regression_data()))),
        "^input_pre .*the default takes a batch of two elements, inputs and targets, or of three",
    ),
    "a loss of one number": (
        weighted_hooks(create_loss=lambda: lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2)),
        "^grad_pre .*the loss is one number for the whole batch, which the sample weights in it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_SAMPLE_WEIGHTS)
def test_what_cannot_be_weighted_is_refused(train: Train, name: str) -> None:
    hooks, message = NO_SAMPLE_WEIGHTS[name]
    with pytest.raises(ctl_core.SetupError, match=message):
        train(hooks, steps=1, batch_size=BATCH)
