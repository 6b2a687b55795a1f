"""Parameter groups: several optimizers for one objective, each with variables of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest

import ctl_core
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
