"""Two tasks whose weights are learnt, after Kendall, Gal and Cipolla 2018.

Each task's loss is weighted by the inverse of a variance, whose logarithm is trained along with
the model: variables of the loss, which ``grad_pre`` names among what is trained.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program

POINTS, DEPTH = small.data(44)
KIND = np.random.default_rng(0).integers(0, 3, size=44)
create_dataset = small.slices((POINTS, {"depth": DEPTH, "kind": KIND}))


def create_model() -> keras.Model:
    keras.utils.set_random_seed(2)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    outputs = {"depth": keras.layers.Dense(1)(hidden), "kind": keras.layers.Dense(3)(hidden)}
    return keras.Model(inputs, outputs)


class UncertaintyLoss(tf.Module):
    """The sum of exp(-s) L + s over the tasks, for each example; s is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = {
            "depth": tf.Variable(0.0, name="depth"),
            "kind": tf.Variable(0.5, name="kind"),
        }
        self.tasks = {
            "depth": keras.losses.MeanSquaredError(reduction="none"),
            "kind": keras.losses.SparseCategoricalCrossentropy(True, reduction="none"),
        }

    def __call__(self, loss_input: Any) -> Any:
        output, target = loss_input
        total = 0.0
        for name, loss in self.tasks.items():
            s = self.log_variance[name]
            total += tf.exp(-s) * loss(target[name], output[name]) + s
        return total


def grad_pre(loss: Any, train_model: Any, train_loss: Any) -> Any:
    return loss, 0.0, [*train_model.trainable_variables, *train_loss.trainable_variables]


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_model=create_model,
    create_loss=UncertaintyLoss,
    grad_pre=grad_pre,
)


def find_weights(state: Any) -> list[Any]:
    return [*state.train_model.trainable_variables, *state.train_loss.trainable_variables]


PROGRAM = Program(hooks, weights=find_weights)
