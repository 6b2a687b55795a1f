"""Compares the bits of tensors."""

from collections.abc import Sequence

import tensorflow as tf

from ctl_core.cluster.exchange import encode_for_sum


def are_all_equal(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns whether tensors have the same bits, as a bool scalar.

    All NaN values are considered equal.
    """
    first, *others = map(read_bits, values)
    return tf.reduce_all([tf.constant(True), *(tf.reduce_all(first == bits) for bits in others)])


def read_bits(value: tf.Tensor) -> tf.Tensor:
    """Returns the bits of a tensor as integers; every NaN becomes the same integer."""
    encoded = encode_for_sum(value)
    if not encoded.dtype.is_floating:
        return encoded
    nan = tf.constant(float("nan"), encoded.dtype)
    encoded = tf.where(tf.math.is_nan(encoded), nan, encoded)
    return tf.bitcast(encoded, tf.int64 if encoded.dtype == tf.float64 else tf.int32)
