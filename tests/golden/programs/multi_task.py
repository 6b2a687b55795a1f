"""Two tasks whose weights are learnt, after Kendall, Gal and Cipolla 2018.

Each task's loss is weighted by the inverse of a variance, whose logarithm is trained along with
the model: variables of the loss, which ``grad_pre`` names among what is trained.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, RATE, STEPS, Program

RANDOM = np.random.default_rng(0)
POINTS = RANDOM.normal(size=(44, 5)).astype("float32")
DEPTH = (POINTS @ RANDOM.normal(size=(5, 1)).astype("float32")).astype("float32")
KIND = RANDOM.integers(0, 3, size=44)

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    examples = tf.data.Dataset.from_tensor_slices((POINTS, {"depth": DEPTH, "kind": KIND}))
    return examples.batch(per_replica_batch_size)


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


def create_opt(lr: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(lr)


def grad_pre(loss: Any, train_model: Any, train_loss: Any) -> Any:
    return loss, 0.0, [*train_model.trainable_variables, *train_loss.trainable_variables]


# ---- The same as a plain loop -----------------------------------------------------------------


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=UncertaintyLoss,
        create_opt=create_opt,
        grad_pre=grad_pre,
        update_pre=lambda gradients: (gradients, gradients),
        every_steps={},
    )


@functools.cache
def train_plainly() -> list[Any]:
    model, loss, optimizer = create_model(), UncertaintyLoss(), keras.optimizers.SGD(RATE)
    variables = [*model.trainable_variables, *loss.trainable_variables]
    for inputs, target in create_dataset(BATCH).take(5).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            total = tf.reduce_mean(loss((model(inputs), target)))
        optimizer.apply_gradients(zip(tape.gradient(total, variables), variables, strict=True))
    return variables


def find_weights(state: Any) -> list[Any]:
    return [*state.train_model.trainable_variables, *state.train_loss.trainable_variables]


PROGRAM = Program(hooks, train_plainly, weights=find_weights)
