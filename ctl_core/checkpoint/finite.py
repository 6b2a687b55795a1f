"""Finds variables that are NaN or infinite, before a checkpoint is written."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ctl_core.model.copies import list_local_components
from ctl_core.model.state import State
from ctl_core.numerics.not_finite import find_finite_entries
from ctl_core.numerics.variables import is_summed, unwrap
from ctl_core.types import Variable

# The hooks whose variables an evaluation uses. ``ema`` stands for the averages of the weights.
_USED = ("create_model/", "create_eval_model/", "ema/")
_TRAINED = ("create_loss/",)


class FiniteVariables:
    """Finds NaN and infinity in all variables that an evaluation uses.

    These are the variables of the model, including moving statistics, the averages of the weights,
    and the trained variables of the loss. An entry that is not finite when this object is created
    does not count, such as an entry of a mask that contains -infinity.

    The loss of a step is computed before the update, so it does not show whether the update has
    made the variables NaN. All processes of a cluster get the same result, since the values of
    these variables are equal, except for moving statistics, which the caller has to average first.
    """

    def __init__(self, state: State) -> None:
        """Reads the initial values of the variables."""
        used = {
            name.removeprefix("create_model/"): variable
            for name, variable in state.recording.variables.items()
            if _is_used(name, variable)
        }
        self._names = list(used)
        # All replicas have the same values, so it is enough to check the first replica.
        self._variables = [
            list_local_components(state.strategy, [variable])[0] for variable in used.values()
        ]
        # Which entries count, for each variable that is not finite at the beginning.
        self._counting: dict[int, tf.Tensor] = {}
        for index, variable in enumerate(self._variables):
            finite = _is_finite(variable)
            if not tf.reduce_all(finite):
                self._counting[index] = finite
        self._are_finite = tf.function(self._check, autograph=False)

    def _check(self) -> tf.Tensor:
        """Returns a tensor of shape [variables] that is True for each finite variable."""
        are_finite = []
        for index, variable in enumerate(self._variables):
            finite = _is_finite(variable)
            if index in self._counting:
                finite |= ~self._counting[index]
            are_finite.append(tf.reduce_all(finite))
        return tf.stack(are_finite)

    def find_nonfinite(self) -> str | None:
        """Returns the name of the first variable that is not finite; None if all are finite."""
        if not self._names:
            return None
        are_finite: np.ndarray = self._are_finite().numpy()
        if are_finite.all():
            return None
        return self._names[are_finite.argmin()]


def _is_used(name: str, variable: Variable) -> bool:
    """Returns True if an evaluation uses a variable, and its dtype can represent NaN.

    Variables that are summed over the replicas are left out, because their values differ between
    the processes of a cluster.
    """
    unwrapped: tf.Variable = unwrap(variable)
    is_part = name.startswith(_USED) or (name.startswith(_TRAINED) and bool(unwrapped.trainable))
    has_nan = unwrapped.dtype.is_floating or unwrapped.dtype.is_complex
    return is_part and has_nan and not is_summed(unwrapped)


def _is_finite(variable: tf.Variable) -> tf.Tensor:
    """Returns for each entry of a variable whether it is finite."""
    with tf.device(variable.device):
        return find_finite_entries(variable.read_value())
