"""Freezing and unfreezing layers from hooks, also across a resume."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.helpers.cases import assert_weights, make_hooks, norm_model
from tests.helpers.fixtures import Train

STEPS, RATE = 14, 0.05
TRAINABLE = {3: True, 7: False, 10: True}  # from the step after


def set_hidden(value: bool) -> Any:
    def change(train_model: Any) -> None:
        for layer in train_model.layers[:-1]:
            layer.trainable = value

    return change


CHANGES = {step: set_hidden(value) for step, value in TRAINABLE.items()}


def test_a_frozen_layer_keeps_its_statistics_from_the_next_step_on(train: Train) -> None:
    seen: list[list[np.ndarray]] = []
    hooks = make_hooks(
        create_model=norm_model,
        at_step=CHANGES,
        every_steps={1: lambda train_model: seen.append(train_model.get_weights())},
    )
    train(hooks, steps=STEPS)
    for step in range(1, STEPS):
        moved = [not np.array_equal(*pair) for pair in zip(*seen[step - 1 : step + 1], strict=True)]
        assert moved == [not 7 <= step < 10] * 6 + [True] * 2, step


def test_what_is_frozen_is_not_regularized_in_an_evaluation_before_and_after_a_resume(
    train: Train,
) -> None:
    def create_model() -> keras.Model:
        model = small.create_model()
        for layer in model.layers:
            layer.kernel.regularizer = keras.regularizers.L2(0.01)
        return model

    hooks = make_hooks(
        create_model=create_model,
        create_eval_dataset=small.create_eval_dataset,
        at_step={3: set_hidden(False)},
    )
    whole = train(hooks, steps=8, run_name="whole")
    for steps in (5, 8):
        parts = train(hooks, steps=steps, run_name="parts")
    assert parts.metrics == whole.metrics


# ---- A dict of optimizers ---------------------------------------------------------------------


def frozen_model() -> keras.Model:
    model = small.create_model()
    model.layers[0].trainable = False
    return model


def each_by_its_own(lr: Any) -> dict[str, keras.Optimizer]:
    return {
        "hidden": keras.optimizers.SGD(lr, momentum=0.9),
        "out": keras.optimizers.SGD(lr, momentum=0.5),
    }


def losses(loss: Any, train_model: Any) -> Any:
    hidden, out = (layer.trainable_variables for layer in train_model.layers)
    return {"hidden": (2.0 * loss, 0.0, hidden), "out": (loss, 0.0, out)}


def train_plainly() -> keras.Model:
    model, optimizers = small.create_model(), each_by_its_own(RATE)
    hidden, out = (layer.trainable_variables for layer in model.layers)
    trained = False
    batches = small.create_dataset(small.BATCH).repeat().take(STEPS)
    for step, (inputs, target) in enumerate(batches):
        trained = TRAINABLE.get(step, trained)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(small.squared_error((model(inputs), target)))
        of_hidden, of_out = tape.gradient(loss, [hidden, out])
        if trained:
            optimizers["hidden"].apply([2.0 * gradient for gradient in of_hidden], hidden)
        optimizers["out"].apply(of_out, out)
    return model


def test_an_objective_whose_variables_are_all_frozen_waits_until_they_are_unfrozen(
    train: Train,
) -> None:
    hooks = make_hooks(
        create_model=frozen_model, create_opt=each_by_its_own, grad_pre=losses, at_step=CHANGES,
        update_pre=small.update_pre,
    )  # fmt: skip
    settings = {"learning_rate": RATE, "virtual_devices": 2}
    for steps in (5, STEPS):
        state = train(hooks, steps=steps, **settings)
    assert_weights(state, train_plainly(), rtol=1e-5)
    assert [int(o.iterations.numpy()) for o in state.optimizer.values()] == [8, STEPS]
