"""Parameter groups: several optimizers for one objective, each with variables of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest

import ctl_core
from tests.golden import small
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train


def group(select: Callable[[list[Any]], list[list[Any]]]) -> Any:
    """Returns a create_opt with one SGD for each list of variables."""

    def create_opt(lr: Any, train_model: Any) -> Any:
        groups = select(train_model.trainable_variables)
        return [(keras.optimizers.SGD(lr), variables) for variables in groups]

    return create_opt


@pytest.mark.parametrize(
    ("select", "said"),
    [
        (lambda v: [v[:2]], r"the variable \S*out/kernel is in no group, expected one"),
        (lambda v: [v, v[3:]], r"the variable \S*out/bias is in 2 groups, expected one"),
    ],
)
def test_a_variable_in_no_group_or_two_is_refused(train: Train, select: Any, said: str) -> None:
    with pytest.raises(ctl_core.SetupError, match=r"create_opt \(test_groups.*" + said):
        train(make_hooks(create_opt=group(select)), steps=1)


def test_what_was_frozen_needs_a_group_once_it_is_not(train: Train) -> None:
    def create_model() -> keras.Model:
        model = small.create_model()
        model.layers[0].trainable = False
        return model

    def melt(train_model: Any) -> None:
        train_model.layers[0].trainable = True

    hooks = make_hooks(
        create_model=create_model, create_opt=group(lambda v: [v]), at_step={2: melt}
    )
    with pytest.raises(ctl_core.RunError, match=r"hidden/kernel is in no group, .*it is frozen"):
        train(hooks, steps=4)
