"""Finds weights that are NaN or infinite, before a checkpoint is written."""

from __future__ import annotations

import tensorflow as tf

from ctl_core.model.copies import list_local_components
from ctl_core.model.state import State
from ctl_core.numerics.variables import unwrap


class FiniteWeights:
    """Finds NaN and infinity in the trainable variables that ``create_model`` has created.

    The loss of a step is computed before the update, so it does not show whether the update has
    made the weights NaN. All processes of a cluster get the same result, since their weights are
    equal.
    """

    def __init__(self, state: State) -> None:
        trained = {
            name.removeprefix("create_model/"): variable
            for name, variable in state.recording.variables.items()
            if name.startswith("create_model/") and _is_trained(variable)
        }
        self._names = list(trained)
        # All replicas have the same values, so it is enough to check the first replica.
        variables = [
            list_local_components(state.strategy, [variable])[0] for variable in trained.values()
        ]

        @tf.function(autograph=False)
        def are_finite() -> tf.Tensor:
            """Returns a tensor of shape [variables] that is True for each finite variable."""
            finite = []
            for variable in variables:
                with tf.device(variable.device):
                    finite.append(tf.reduce_all(tf.math.is_finite(variable.read_value())))
            return tf.stack(finite)

        self._are_finite = are_finite

    def find_nonfinite(self) -> str | None:
        """Returns the name of the first variable that is not finite; None if all are finite."""
        if not self._names:
            return None
        are_finite = self._are_finite().numpy()
        if are_finite.all():
            return None
        return self._names[are_finite.argmin()]


def _is_trained(variable: tf.Variable) -> bool:
    """Returns True if a variable is trainable and its dtype can represent NaN."""
    variable = unwrap(variable)
    return bool(variable.trainable) and (variable.dtype.is_floating or variable.dtype.is_complex)
