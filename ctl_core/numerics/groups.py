"""Parameter groups: one objective, several optimizers, each with variables of its own."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from ctl_core.numerics.variables import plain_variable, variable_name


class OptimizerGroups(tf.Module):
    """What ``create_opt`` gets when it returns pairs (optimizer, variables), as one optimizer.

    Attributes:
        optimizers: one for each group
        built: whether the variables of the optimizers are there
    """

    def __init__(self, pairs: Sequence[tuple[Any, Iterable[Any]]]) -> None:
        """Takes the pairs."""
        super().__init__(name="groups")
        self.optimizers = [optimizer for optimizer, _ in pairs]
        self.built = False
        # In a lambda nothing is followed: the variables are the model's.
        groups = tuple(tuple(variables) for _, variables in pairs)
        self._groups = lambda: groups

    def __getitem__(self, index: int) -> Any:
        return self.optimizers[index]  # hooks name the optimizer as they have returned it

    def _check_groups(self, variables: Iterable[Any]) -> None:
        """Refuses variables that are trained, and not frozen, and in no group or two."""
        groups = itertools.chain(*self._groups())
        counts = collections.Counter(id(plain_variable(one)) for one in groups)
        for variable in variables:
            count = counts[id(plain_variable(variable))]
            if count != 1 and getattr(variable, "trainable", True):
                where = "no group" if count == 0 else f"{count} groups"
                raise ValueError(
                    f"the variable {variable_name(variable)} is in {where}, expected one, also "
                    "while it is frozen"
                )

    def build(self, variables: Iterable[Any]) -> None:
        """Lets each optimizer make its own variables.

        Raises:
            ValueError: one of the variables is in no group, or in several.
        """
        self._check_groups(variables)
        for optimizer, group in zip(self.optimizers, self._groups(), strict=True):
            if callable(getattr(optimizer, "build", None)) and not optimizer.built:
                optimizer.build(list(group))
        self.built = True

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Hands each gradient to the optimizer of its variable's group.

        Raises:
            ValueError: a variable is in no group: it was frozen when the groups were made.
        """
        pairs = list(grads_and_vars)
        self._check_groups(variable for _, variable in pairs)
        for optimizer, group in zip(self.optimizers, self._groups(), strict=True):
            own = {id(plain_variable(variable)) for variable in group}
            part = [pair for pair in pairs if id(plain_variable(pair[1])) in own]
            if part:
                optimizer.apply_gradients(part)


def is_pairs(made: Any) -> bool:
    """Whether ``create_opt`` has returned pairs (optimizer, variables)."""
    return isinstance(made, list | tuple) and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and hasattr(pair[0], "apply_gradients")
        and isinstance(pair[1], list | tuple)
        for pair in made
    )
