"""Parameter groups: several optimizers for one objective, each with variables of its own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import FEATURES, make_hooks, regression_data, set_weights
from tests.helpers.fixtures import Train

STEPS, BATCH, RATE = 12, 16, 0.02


def lazy_model() -> keras.Model:
    """Its variables are there only when it has been called."""
    return keras.Sequential(
        [keras.layers.Dense(8, "tanh", name="body"), keras.layers.Dense(1, name="head")]
    )


def model() -> keras.Model:
    made = lazy_model()
    made.build((None, FEATURES))
    return set_weights(made)


def no_decay_on_biases(lr: Any, train_model: Any) -> Any:
    """As people write it for AdamW: weight decay for kernels, and a slower rate for the body."""
    variables = train_model.trainable_variables
    return [
        (
            keras.optimizers.AdamW(lr, weight_decay=0.1),
            [v for v in variables if v.name == "kernel" and "head" in v.path],
        ),
        (keras.optimizers.SGD(lr * 0.5), [v for v in variables if "body" in v.path]),
        (
            keras.optimizers.Adam(lr),
            [v for v in variables if v.name == "bias" and "head" in v.path],
        ),
    ]


def by_hand(steps: int = STEPS) -> list[np.ndarray]:
    made = model()
    body, head = made.layers
    groups = [
        (keras.optimizers.AdamW(RATE, weight_decay=0.1), [head.kernel]),
        (keras.optimizers.SGD(0.5 * RATE), [body.kernel, body.bias]),
        (keras.optimizers.Adam(RATE), [head.bias]),
    ]
    data = tf.data.Dataset.from_tensor_slices(regression_data()).batch(BATCH, drop_remainder=True)
    for inputs, target in data.repeat().take(steps):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum((made(inputs) - target) ** 2) / BATCH
        variables = [v for _, several in groups for v in several]
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
        for optimizer, several in groups:
            own, gradients = gradients[: len(several)], gradients[len(several) :]
            optimizer.apply_gradients(zip(own, several, strict=True))
    return made.get_weights()  # type: ignore[no-any-return]


def hooks(**more: Any) -> Any:
    own = {
        "create_model": model,
        "create_opt": no_decay_on_biases,
        "update_pre": lambda gradients: (tf.clip_by_global_norm(gradients, 1.0)[0], gradients),
    }
    return make_hooks(**{**own, **more})


def assert_equal(state: ctl_core.State, weights: list[np.ndarray]) -> None:
    for ours, theirs in zip(state.train_model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3e-5, atol=3e-6)


def test_the_rate_reaches_each_group(train: Train) -> None:
    own = hooks(at_step={6: lambda lr: lr.assign(0.0)})
    state = train(own, steps=STEPS, learning_rate=RATE)
    assert_equal(state, by_hand(6))


def test_a_model_that_is_built_late_has_its_variables_there(train: Train) -> None:
    state = train(hooks(create_model=lazy_model), steps=2, virtual_devices=2)
    assert len(state.optimizer) == 3 and len(state.optimizer[0].variables) == 3


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda v: [v[:2]], r"the variable \S*head/kernel is in no group, expected one"),
        (lambda v: [v, v[3:]], r"the variable \S*head/bias is in 2 groups, expected one"),
    ],
)
def test_a_variable_in_no_group_or_two_is_refused(train: Train, groups: Any, said: str) -> None:
    def create_opt(lr: Any, train_model: Any) -> Any:
        several = groups(train_model.trainable_variables)
        return [(keras.optimizers.SGD(lr), variables) for variables in several]

    with pytest.raises(ctl_core.SetupError, match=r"create_opt \(test_groups.*" + said):
        train(hooks(create_opt=create_opt), steps=1)


def test_what_was_frozen_needs_a_group_once_it_is_not(train: Train) -> None:
    def frozen() -> keras.Model:
        made = model()
        made.layers[0].trainable = False
        return made

    def melt(train_model: Any) -> None:
        train_model.layers[0].trainable = True

    def create_opt(lr: Any, train_model: Any) -> Any:
        return [(keras.optimizers.SGD(lr), [v]) for v in train_model.trainable_variables]

    assert train(hooks(create_model=frozen, create_opt=create_opt), steps=2).step == 2
    own = hooks(create_model=frozen, create_opt=create_opt, at_step={2: melt})
    with pytest.raises(ctl_core.RunError, match=r"body/kernel is in no group, .*it is frozen"):
        train(own, steps=4, run_name="melt")
