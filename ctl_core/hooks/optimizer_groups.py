"""Combines several optimizers for one objective, each of which updates some variables."""

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeGuard

import tensorflow as tf

from ctl_core.numerics.variables import name_variable, unwrap
from ctl_core.types import Gradient, Optimizer, UserObject, Variable

# An optimizer, and the variables that it updates.
Pair: TypeAlias = tuple[Optimizer, Sequence[Variable]]


class OptimizerGroups(tf.Module):
    """Combines the pairs (optimizer, variables) that ``create_opt`` returns into one optimizer.

    Attributes:
        optimizers: the optimizers in the order of the pairs
        built: whether ``build`` was called
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        super().__init__(name="groups")
        self.optimizers = [optimizer for optimizer, _ in pairs]
        self.built = False
        # The groups are hidden in a function. TensorFlow would save the variables of a plain
        # attribute with the optimizers, although they are already saved with the model.
        groups = tuple(tuple(variables) for _, variables in pairs)
        self._get_groups: Callable[[], tuple[tuple[Variable, ...], ...]] = lambda: groups

    def __getitem__(self, index: int) -> Optimizer:
        """Returns one optimizer by its index, so that hooks can read ``optimizer[0]``."""
        return self.optimizers[index]

    def _find_group(self, variable: Variable) -> int:
        """Returns the index of a variable's group.

        Raises:
            ValueError: the variable is in no group, or in several groups.
        """
        plain = unwrap(variable)
        indices = [
            index
            for index, group in enumerate(self._get_groups())
            if any(unwrap(member) is plain for member in group)
        ]
        if len(indices) != 1:
            groups = f"{len(indices)} groups" if indices else "no group"
            raise ValueError(
                f"the variable {name_variable(variable)} is in {groups}; it must be in exactly "
                "one, even while it is frozen"
            )
        return indices[0]

    def build(self, variables: Iterable[Variable]) -> None:
        """Lets each optimizer create its own variables.

        Raises:
            ValueError: a variable that is not frozen is in no group, or in several groups.
        """
        for variable in variables:
            if getattr(variable, "trainable", True):
                self._find_group(variable)
        for optimizer, group in zip(self.optimizers, self._get_groups(), strict=True):
            build = getattr(optimizer, "build", None)
            if callable(build) and not getattr(optimizer, "built", False):
                build(list(group))
        self.built = True

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient | None, Variable]]) -> None:
        """Passes each gradient to the optimizer of its variable's group.

        Raises:
            ValueError: a variable is in no group. This can happen if it was frozen when
                ``create_opt`` was called.
        """
        pairs_by_group = collections.defaultdict(list)
        for gradient, variable in grads_and_vars:
            pairs_by_group[self._find_group(variable)].append((gradient, variable))
        for index, pairs in sorted(pairs_by_group.items()):
            self.optimizers[index].apply_gradients(pairs)


def is_pairs(optimizers: UserObject) -> TypeGuard[Sequence[Pair]]:
    """Returns whether ``create_opt`` returned pairs (optimizer, variables)."""
    return isinstance(optimizers, list | tuple) and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and hasattr(pair[0], "apply_gradients")
        and isinstance(pair[1], list | tuple)
        for pair in optimizers
    )
