"""Freezing and unfreezing layers from hooks, also across a resume."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import (
    FEATURES,
    assert_weights,
    make_hooks,
    regression_data,
    set_weights,
    squared_error,
)
from tests.helpers.fixtures import Train

pytestmark = pytest.mark.slow


def normed_model() -> keras.Model:
    return set_weights(
        keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(6, name="first"),
                keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()]),
                keras.layers.Dense(1, name="last"),
            ]
        )
    )


def freeze(train_model: Any) -> None:
    train_model.layers[0].trainable = False
    train_model.layers[1].trainable = False


def unfreeze(train_model: Any) -> None:
    train_model.layers[0].trainable = True
    train_model.layers[1].trainable = True


def freezing_hooks(history: dict[int, list[np.ndarray]]) -> Any:
    def note(step: int, train_model: Any) -> None:
        history[step] = train_model.get_weights()

    return make_hooks(
        create_model=normed_model,
        every_steps={1: note},
        at_step={4: freeze, 9: unfreeze},
    )


def changed(before: list[np.ndarray], after: list[np.ndarray]) -> list[bool]:
    return [not np.array_equal(b, a) for b, a in zip(before, after, strict=True)]


def test_freezing_takes_effect_on_the_very_next_step_and_until_unfrozen(train: Train) -> None:
    history: dict[int, list[np.ndarray]] = {}
    state = train(freezing_hooks(history), steps=12)
    names = [weight.path for weight in normed_model().weights]
    last = [name.startswith("last") or "/last/" in name for name in names]
    for step in range(2, 13):
        moved = changed(history[step - 1], history[step])
        # A frozen BatchNormalization runs in inference mode: its statistics stay too.
        expected = last if 4 < step <= 9 else [True] * len(names)
        assert moved == expected, step
    assert state.functions.trace_counts() == [1, 1]  # of the free model and of the frozen one


# ---- A dict of optimizers ---------------------------------------------------------------------

STEPS, BATCH, RATE = 14, 16, 0.05


def base_and_head(trainable: bool = False) -> keras.Model:
    model = set_weights(
        keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(6, name="base", activation="tanh"),
                keras.layers.Dense(1, name="head"),
            ]
        )
    )
    model.layers[0].trainable = trainable
    return model


def each_by_its_own(lr: Any) -> dict[str, keras.Optimizer]:
    return {
        "base": keras.optimizers.SGD(lr, momentum=0.9),
        "head": keras.optimizers.SGD(lr, momentum=0.5),
    }


def base_and_head_losses(loss: Any, train_model: Any) -> Any:
    base, head = (layer.trainable_variables for layer in train_model.layers)
    return {"base": (2.0 * loss, 0.0, base), "head": (loss, 0.0, head)}


TRAINABLE = {3: True, 7: False, 10: True}  # from the step after


def fine_tuning(seen: dict[int, Any]) -> Any:
    def note(step: int, loss: Any, update_gradients: Any, display_gradients: Any) -> None:
        counts = [len(of_one["base"]) for of_one in (update_gradients, display_gradients)]
        seen[step] = float(loss["base"]), counts

    def set_base(value: bool) -> Any:
        def change(train_model: Any) -> None:
            train_model.layers[0].trainable = value

        return change

    return make_hooks(
        create_model=base_and_head,
        create_opt=each_by_its_own,
        grad_pre=base_and_head_losses,
        every_steps={1: note},
        at_step={step: set_base(value) for step, value in TRAINABLE.items()},
    )


def fine_tuned_by_hand() -> tuple[list[np.ndarray], list[int], dict[int, float]]:
    model, optimizers, losses = base_and_head(), each_by_its_own(RATE), {}
    (base, head), (inputs, target) = model.layers, regression_data()
    optimizers["base"].build(base.weights)
    optimizers["head"].build(head.weights)
    passes = len(inputs) // BATCH
    trainable = False
    for step in range(STEPS):
        trainable = TRAINABLE.get(step, trainable)
        part = slice((step % passes) * BATCH, (step % passes + 1) * BATCH)
        with tf.GradientTape() as tape:
            tape.watch([weight.value for weight in model.weights])
            loss = tf.reduce_mean(squared_error((model(inputs[part]), target[part])))
        of_base, of_head = tape.gradient(loss, [[w.value for w in layer.weights] for layer in
                                                (base, head)])  # fmt: skip
        if trainable:
            doubled = [2.0 * gradient for gradient in of_base]
            optimizers["base"].apply_gradients(zip(doubled, base.weights, strict=True))
        optimizers["head"].apply_gradients(zip(of_head, head.weights, strict=True))
        losses[step + 1] = 2.0 * float(loss)
    return model.get_weights(), [int(o.iterations) for o in optimizers.values()], losses


@pytest.mark.parametrize(("devices", "accumulate"), [(1, 1), (2, 1), (2, 2)])
def test_an_objective_whose_variables_are_all_frozen_waits_until_they_are_unfrozen(
    train: Train, devices: int, accumulate: int
) -> None:
    seen: dict[int, Any] = {}
    settings = {"learning_rate": RATE, "virtual_devices": devices, "accumulate_steps": accumulate}
    whole = train(fine_tuning(seen), steps=STEPS, run_name="whole", **settings)
    for steps in (2, 8, STEPS):
        parts = train(fine_tuning({}), steps=steps, run_name="parts", **settings)
    weights, iterations, losses = fine_tuned_by_hand()
    assert iterations == [8, STEPS]
    for state in (whole, parts):
        assert_weights(state, weights, rtol=1e-5)
        assert [int(o.iterations.numpy()) for o in state.optimizer.values()] == iterations
        assert [len(o.variables) for o in state.optimizer.values()] == [3, 3], "slots of its own"
    for step, (loss, counts) in seen.items():
        np.testing.assert_allclose(loss, losses[step], rtol=1e-5)
        assert counts == ([2, 2] if 3 < step <= 7 or step > 10 else [0, 0])


def test_where_all_objectives_are_frozen_or_one_has_nothing_there_is_nothing_to_train(
    train: Train,
) -> None:
    hooks = fine_tuning({})
    hooks.create_model = lambda: base_and_head(trainable=True)
    hooks.at_step = {2: lambda train_model: setattr(train_model, "trainable", False)}
    with pytest.raises(ctl_core.SetupError, match=r"grad_pre .*there is nothing to train"):
        train(hooks, steps=4, run_name="frozen")
    hooks = fine_tuning({})
    hooks.grad_pre = lambda loss, train_model: {
        "base": (loss, 0.0, []),
        "head": (loss, 0.0, train_model.trainable_variables),
    }
    with pytest.raises(ctl_core.SetupError, match=r"\['base'\]: returned no trainable_vars"):
        train(hooks, steps=4, run_name="empty")
