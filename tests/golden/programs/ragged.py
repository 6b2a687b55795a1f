"""Ragged rows in a dict; the model gives a dict, of which two parts are in the loss."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, RATE, STEPS, Program

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(1, 5, size=44)
VALUES = RANDOM.normal(size=LENGTHS.sum()).astype("float32")

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    rows = tf.RaggedTensor.from_row_lengths(VALUES, LENGTHS)
    data = {"rows": rows, "sum": tf.reduce_sum(rows, axis=1), "length": LENGTHS}
    return tf.data.Dataset.from_tensor_slices(data).batch(per_replica_batch_size)


class Sums(tf.Module):
    """Two guesses for each row, from its values one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = tf.Variable([0.3, -0.2]), tf.Variable([0.1, 0.2])

    def __call__(self, rows: Any) -> Any:
        hidden = tf.tanh(rows.values[:, None] * self.scale + self.shift)
        sums = tf.math.segment_sum(hidden, rows.value_rowids())
        return {"sum": sums[:, 0], "length": sums[:, 1], "rows": rows}


def squared_error(loss_input: Any) -> Any:
    output, batch = loss_input
    length = tf.cast(batch["length"], tf.float32)
    return (output["sum"] - batch["sum"]) ** 2 + 0.1 * (output["length"] - length) ** 2


# ---- The same as a plain loop -----------------------------------------------------------------


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=Sums,
        create_loss=lambda: squared_error,
        create_opt=lambda lr: keras.optimizers.SGD(lr),
        input_pre=lambda batch: batch["rows"],
        loss_pre=lambda output, batch: (output, batch),
        update_pre=lambda gradients: (gradients, gradients),
        every_steps={},
    )


@functools.cache
def train_plainly() -> list[tf.Variable]:
    model = Sums()
    for batch in create_dataset(BATCH).take(5).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(squared_error((model(batch["rows"]), batch)))
        variables = [model.scale, model.shift]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * gradient)
    return [model.scale, model.shift]


PROGRAM = Program(
    hooks,
    train_plainly,
    weights=lambda state: [state.train_model.scale, state.train_model.shift],
    compiles=False,  # rows are of no shape that XLA knows
)
