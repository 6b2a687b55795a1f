"""Changes the results of arithmetic slightly, to measure how rounding affects the values of a step.

A sum whose terms cancel is small compared with its terms, and its rounding errors are not small
compared with the sum. Only a measurement shows how large they can be: each result of an op is
multiplied by a number close to 1, as if floating-point numbers had fewer digits.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf

from ctl_core.compat import change_results

# The largest relative change of a result. The rounding error of float32 is about 1 / 256 of it.
_LARGEST_CHANGE = 2.0**-16
# Ops that round. All other ops, such as comparisons, copies and maxima, must stay exact.
_ARITHMETIC = frozenset(
    {
        "Add", "AddN", "AddV2", "BatchMatMulV2", "BatchMatMulV3", "BiasAdd", "BiasAddGrad",
        "Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "Conv3D", "Cos", "Cumsum",
        "DepthwiseConv2dNative", "DivNoNan", "Einsum", "Elu", "Erf", "Exp", "Expm1",
        "FusedBatchNormV3", "FusedBatchNormGradV3", "Log", "Log1p", "LogSoftmax", "MatMul", "Mean",
        "Mul", "Pow", "Prod", "RealDiv", "Reciprocal", "Rsqrt", "SegmentSum", "Sigmoid",
        "SigmoidGrad", "Sin", "Softmax", "SoftmaxCrossEntropyWithLogits", "Softplus",
        "SoftplusGrad", "SparseSoftmaxCrossEntropyWithLogits", "Sqrt", "Square",
        "SquaredDifference", "Sub", "Sum", "Tanh", "TanhGrad", "UnsortedSegmentSum",
    }
)  # fmt: skip


def round_coarsely() -> contextlib.AbstractContextManager[None]:
    """Makes the graphs that this thread traces inside the context round coarsely."""
    return change_results(_change)


def _change(op_type: str, result: tf.Tensor) -> tf.Tensor:
    """Returns a result of an op with a change that depends only on the value.

    Equal values thus stay equal, and comparisons between them have the same result. Whole numbers
    do not change, because they may be counts.
    """
    if op_type not in _ARITHMETIC or result.dtype not in (tf.float32, tf.float64):
        return result
    bits = tf.bitcast(tf.cast(result, tf.float32), tf.int32)
    bits = tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, 15)) * 0x2C1B3C6D
    bits = tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, 12)) * 0x297A2D39
    noise = tf.cast(bits, result.dtype) / 2.0**31  # from -1 to 1
    changed = result * (1.0 + _LARGEST_CHANGE * noise)
    return tf.where(tf.equal(result, tf.round(result)), result, changed)
