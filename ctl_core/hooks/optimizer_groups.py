"""Parameter groups: one objective, several optimizers, each with variables of its own."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from ctl_core.numerics.variables import name_variable, unwrap


class OptimizerGroups(tf.Module):
    """The pairs (optimizer, variables) that ``create_opt`` returns, as one optimizer."""

    def __init__(self, pairs: Sequence[tuple[Any, Iterable[Any]]]) -> None:
        super().__init__(name="groups")
        self.optimizers = [optimizer for optimizer, _ in pairs]
        self.built = False
        # In a lambda nothing is followed: the variables are the model's.
        groups = tuple(tuple(variables) for _, variables in pairs)
        self._groups = lambda: groups

    def __getitem__(self, index: int) -> Any:
        return self.optimizers[index]  # hooks name the optimizer as they have returned it

    def _find_group(self, variable: Any) -> int:
        """Returns the index of a variable's group; refuses one that is in none, or in several."""
        plain = unwrap(variable)
        own = [
            index
            for index, group in enumerate(self._groups())
            if any(unwrap(one) is plain for one in group)
        ]
        if len(own) != 1:
            where = f"{len(own)} groups" if own else "no group"
            raise ValueError(
                f"the variable {name_variable(variable)} is in {where}, expected one, also "
                "while it is frozen"
            )
        return own[0]

    def build(self, variables: Iterable[Any]) -> None:
        """Lets each optimizer make its own variables.

        Raises:
            ValueError: one of the variables, which is not frozen, is in no group, or in several.
        """
        for variable in variables:
            if getattr(variable, "trainable", True):
                self._find_group(variable)
        for optimizer, group in zip(self.optimizers, self._groups(), strict=True):
            if callable(getattr(optimizer, "build", None)) and not optimizer.built:
                optimizer.build(list(group))
        self.built = True

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Hands each gradient to the optimizer of its variable's group.

        Raises:
            ValueError: a variable is in no group: it was frozen when the groups were made.
        """
        by_group = collections.defaultdict(list)
        for pair in grads_and_vars:
            by_group[self._find_group(pair[1])].append(pair)
        for index, pairs in sorted(by_group.items()):
            self.optimizers[index].apply_gradients(pairs)


def is_pairs(made: Any) -> bool:
    """Whether ``create_opt`` has returned pairs (optimizer, variables)."""
    return isinstance(made, list | tuple) and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and hasattr(pair[0], "apply_gradients")
        and isinstance(pair[1], list | tuple)
        for pair in made
    )
