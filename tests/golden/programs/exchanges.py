"""A loss that exchanges values of many dtypes, ragged and sparse tensors, maxima and minima."""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden import small
from tests.golden.catalogue import Program

# One dtype for each way in which values are converted before they are exchanged.
INTEGERS = ["int8", "uint64"]
REALS = [*INTEGERS, "bfloat16"]
NUMBERS = [*REALS, "complex64"]
RANDOM = np.random.default_rng(0)
# Whole numbers from 0 to 3, which are exact in each dtype, and so is their sum over a batch.
INPUTS = RANDOM.integers(0, 4, (40, small.FEATURES)).astype("float32")
TARGET = RANDOM.normal(size=(40, 1)).astype("float32")
create_dataset = small.slices((INPUTS, TARGET))


def to_float(values: Any) -> Any:
    return tf.math.real(tf.cast(values, tf.complex64))


def exchange_numbers(inputs: Any) -> Any:
    """Returns a row that changes if a single dtype is exchanged wrongly."""
    total = tf.zeros([small.FEATURES])
    for place, dtype in enumerate(NUMBERS, start=1):
        values = tf.cast(inputs, dtype)
        gathered = ctl_core.all_gather((values, inputs[:, :1] > 0))
        total += to_float(gathered[0][0] + gathered[0][3]) / place + to_float(gathered[1][2])
        summed = ctl_core.all_reduce(tf.cast(tf.reduce_sum(inputs, 0), dtype))
        total += to_float(summed) / (10 * place)
        if dtype in REALS:
            total += to_float(ctl_core.all_reduce(tf.reduce_max(values, 0), "max")) / place
        if dtype not in INTEGERS:
            mean = tf.cast(tf.reduce_mean(inputs, 0), dtype)
            total += to_float(ctl_core.all_reduce(mean, "mean")) / place
    return total / 100.0


def exchange_rows(inputs: Any) -> Any:
    """Returns the sums of the neighbors' rows, which are exchanged as sparse and ragged tensors."""
    own = ctl_core.row_offset() + tf.range(tf.shape(inputs)[0])
    lengths = tf.cast(inputs[:, 0], tf.int32)
    rows = tf.RaggedTensor.from_tensor(inputs, lengths)
    nested = tf.RaggedTensor.from_tensor(inputs[:, :, None] * [1.0, 2.0], lengths)
    texts = tf.strings.as_string(tf.cast(inputs[:, :2], tf.int32))
    texts = tf.where(texts == "3", "", texts + "é,")
    parts = [
        tf.reduce_sum(ctl_core.all_gather(rows), 1),
        tf.reduce_sum(ctl_core.all_gather(nested), [1, 2]),
        tf.reduce_sum(ctl_core.all_gather(tf.ragged.stack([rows, rows], 1)), [1, 2]),
        tf.sparse.reduce_sum(ctl_core.all_gather(tf.sparse.from_dense(inputs)), 1),
        to_float(tf.reduce_sum(tf.strings.length(ctl_core.all_gather(texts)), 1)),
    ]
    neighbors = (own + 1) % tf.shape(parts[0])[0]
    total: Any = sum(tf.gather(part, neighbors) for part in parts)
    return total[:, None] / 20.0


def find_next(output: Any) -> Any:
    """Returns the output for the row after each row of this replica; its gradient is sparse."""
    outputs = ctl_core.all_gather(output)
    own = ctl_core.row_offset() + tf.range(tf.shape(output)[0])
    return tf.gather(outputs, (own + 1) % tf.shape(outputs)[0])


def loss_pre(output: Any, batch: Any) -> Any:
    """Returns outputs in the range of all outputs, which all outputs at its ends determine."""
    inputs, target = batch
    highest = ctl_core.all_reduce(tf.reduce_max(output, 0), "max")
    lowest = ctl_core.all_reduce(tf.reduce_min(output, 0), "min")
    fixed = tf.reduce_sum(exchange_numbers(inputs)) / 100.0 + exchange_rows(inputs)
    near = tf.reduce_sum(find_next(output), 1, keepdims=True)
    return (output - lowest) / (highest - lowest + 1.0) + 0.1 * (fixed * output + near), target


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_model=lambda: small.model_with(keras.layers.Dense(4)),
    loss_pre=loss_pre,
)

PROGRAM = Program(hooks, accumulates=False, compiles=False)
