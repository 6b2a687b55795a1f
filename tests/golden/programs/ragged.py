"""Ragged rows in a dict; the model gives a dict, of which two parts are in the loss."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(1, 5, size=44)
VALUES = RANDOM.normal(size=LENGTHS.sum()).astype("float32")


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    rows = tf.RaggedTensor.from_row_lengths(VALUES, LENGTHS)
    data = {"rows": rows, "sum": tf.reduce_sum(rows, axis=1), "length": LENGTHS}
    return small.slices(data)(per_replica_batch_size)


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


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_model=Sums,
    create_loss=lambda: squared_error,
    input_pre=lambda batch: batch["rows"],
    loss_pre=lambda output, batch: (output, batch),
)


PROGRAM = Program(
    hooks,
    weights=lambda state: state.train_model.variables,
    compiles=False,  # rows are of no shape that XLA knows
)
