"""Parameter groups: several optimizers for one objective, each with variables of its own."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import ctl_core
from tests.helpers.cases import FEATURES, assert_weights, make_hooks, set_weights
from tests.helpers.fixtures import Train


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


def hooks(**more: Any) -> Any:
    return make_hooks(**{"create_model": model, "create_opt": no_decay_on_biases, **more})


def test_the_rate_reaches_each_group(train: Train) -> None:
    """With a rate of 0, none of them moves any more."""
    halfway = train(hooks(), steps=6, run_name="halfway")
    own = hooks(at_step={6: lambda lr: lr.assign(0.0)})
    assert_weights(train(own, steps=12), halfway)


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
