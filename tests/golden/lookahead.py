"""An optimizer, as a user may write it, that copies the weights when it is built."""

from typing import Any

import keras
import tensorflow as tf


class Lookahead(keras.optimizers.SGD):
    """Moves slow weights halfway to the weights every third step, and continues from there."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.slow = [keras.Variable(variable, trainable=False) for variable in variables]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(grads, trainable_variables)
        tf.cond(tf.equal(self.iterations % 3, 0), self.look, lambda: None)

    def look(self) -> None:
        for slow, variable in zip(self.slow, self._trainable_variables, strict=True):
            slow.assign(slow + 0.5 * (variable - slow))
            variable.assign(slow)
