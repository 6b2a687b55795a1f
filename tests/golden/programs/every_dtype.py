"""A linear model with a state of each dtype that a variable can have, and weights of each dtype.

Quantized models have such states, and layers for signals such weights. The variables of one half of
the state are constants, such as lookup tables; the others are assigned in each step.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program, Trained, whole_batches
from tests.golden.reference import RATE

INTEGERS = [tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64]
FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
FLOAT8 = [tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2]
COMPLEX = [tf.complex64, tf.complex128]
# The integers that represent quantized numbers.
QUANTIZED = {tf.qint8: tf.int8, tf.quint8: tf.uint8, tf.qint32: tf.int32}
NUMBERS = [*INTEGERS, *FLOATS, *FLOAT8, *COMPLEX, *QUANTIZED, tf.bool]
TRAINED = [tf.float32, tf.float64, tf.bfloat16, *COMPLEX]


def convert(numbers: Any, dtype: tf.DType) -> tf.Tensor:
    """Converts small integers to a dtype; the imaginary part is half of the real part."""
    if dtype == tf.string:
        return tf.strings.as_string(numbers)
    if dtype in COMPLEX:
        return tf.cast(numbers, dtype) * (1 + 0.5j)
    return tf.cast(tf.cast(numbers, tf.float32), dtype)


def read(variable: tf.Variable) -> tf.Tensor:
    """Returns the value of a variable as float32; the parts of complex numbers are added up."""
    if variable.dtype == tf.string:
        return tf.strings.to_number(variable)
    if variable.dtype in COMPLEX:
        return tf.cast(tf.math.real(variable) + tf.math.imag(variable), tf.float32)
    if variable.dtype in QUANTIZED:
        return tf.cast(tf.bitcast(variable, QUANTIZED[variable.dtype]), tf.float32)
    return tf.cast(variable, tf.float32)


def rotate(variable: tf.Variable) -> tf.Tensor:
    value = variable.read_value()
    return tf.concat([value[-1:], value[:-1]], axis=0)


class EveryDtype(tf.Module):
    """Returns one column for each trained dtype.

    Args:
        states: the dtypes of the state, out of ``NUMBERS``; there is always a constant string, too
        trained: the dtypes of the weights
    """

    def __init__(self, states: list[tf.DType], trained: list[tf.DType]) -> None:
        super().__init__()
        numbers = np.arange(4) % 3

        def create_states(name: str, dtypes: list[tf.DType]) -> list[tf.Variable]:
            return [
                tf.Variable(convert(numbers, dtype), trainable=False, name=f"{name}_{dtype.name}")
                for dtype in dtypes
            ]

        self.constants = create_states("constant", [*states, tf.string])
        self.assigned = create_states("assigned", states)
        start = np.arange(small.FEATURES) % 3
        self.trained = [tf.Variable(convert(start, dtype), name=dtype.name) for dtype in trained]

    def __call__(self, inputs: Any) -> Any:
        for variable in self.assigned:
            variable.assign(rotate(variable))
        for state in (*self.constants, *self.assigned):
            inputs *= 1.0 + 0.001 * tf.reduce_sum(read(state) * [1.0, 2.0, 3.0, 4.0])
        return tf.stack([self.compute_column(inputs, weight) for weight in self.trained], axis=1)

    def compute_column(self, inputs: Any, weight: tf.Variable) -> Any:
        product = tf.reduce_sum(tf.cast(inputs, weight.dtype) * weight, axis=1)
        if weight.dtype in COMPLEX:
            product = tf.math.real(product) + 0.5 * tf.math.imag(product)
        return tf.cast(product, tf.float32)


def compute_loss(pair: Any) -> Any:
    return 0.1 * small.squared_error(pair)


def hooks(states: list[tf.DType] = NUMBERS, trained: list[tf.DType] = TRAINED) -> SimpleNamespace:
    """Returns the hooks; ``update_pre`` and all others are the engine's defaults."""
    made = small.hooks(
        create_dataset=small.slices(small.data(44)),
        create_model=lambda: EveryDtype(states, trained),
        create_loss=lambda: compute_loss,
    )
    del made.update_pre
    return made


def list_weights(state: Any) -> list[np.ndarray]:
    """Returns all weights except the bfloat16 ones, whose sums over replicas are rounded."""
    model = state.train_model
    trained = [weight for weight in model.trained if weight.dtype != tf.bfloat16]
    return [read(variable).numpy() for variable in (*trained, *model.assigned)]


def train_plainly() -> Trained:
    model = EveryDtype(NUMBERS, TRAINED)
    for inputs, target in whole_batches(small.slices(small.data(44))):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(compute_loss((model(inputs), target)))
        gradients = tape.gradient(loss, model.trained)
        squares = [np.sum(np.abs(tf.cast(each, tf.complex128)) ** 2) for each in gradients]
        assert np.sum(squares) < 10.0**2, "a clip would add the rounding of bfloat16 to all weights"
        for weight, gradient in zip(model.trained, gradients, strict=True):
            weight.assign_sub(tf.cast(RATE, weight.dtype) * gradient)
    return list_weights(SimpleNamespace(train_model=model)), {}


# XLA does not compile strings. Each micro-batch would assign the state.
PROGRAM = Program(hooks, train_plainly, list_weights, accumulates=False, compiles=False)
