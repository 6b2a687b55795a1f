"""Weights of each dtype that can be trained, alone. ``programs/every_dtype.py`` has all dtypes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.programs import every_dtype
from tests.golden.reference import RATE

AVERAGED = 0.5
TRAINED = [each for each in every_dtype.TRAINED if each != tf.float32]
WAYS: dict[str, dict[str, Any]] = {
    "three devices": {"virtual_devices": 3},
    "averages": {"virtual_devices": 3, "ema": AVERAGED},
    "logical replicas": {"virtual_devices": 3, "logical_replicas": 4},
    "micro-batches": {"virtual_devices": 2, "accumulate_steps": 2},
    "compiled": {"jit_compile": True},
    "searches for NaN": {"detect_anomaly": True},
}
STEPS = 6


class Filter(tf.Module):
    """A linear filter, and a table of which each example reads some rows."""

    def __init__(self, dtype: tf.DType) -> None:
        super().__init__()
        numbers = np.arange(small.FEATURES) % 3
        self.weight = tf.Variable(every_dtype.convert(numbers, dtype), name="weight")
        self.table = tf.Variable(every_dtype.convert(numbers, dtype), name="table")

    def __call__(self, inputs: Any) -> Any:
        rows = tf.cast(inputs[:, :1] > 0.0, tf.int32)
        product = tf.cast(inputs, self.weight.dtype) * self.weight
        product = tf.reduce_sum(product, 1, keepdims=True) + tf.gather(self.table, rows)
        if product.dtype.is_complex:
            product = tf.abs(product)
        return tf.cast(product, tf.float32)


def make_hooks(dtype: tf.DType, **more: Any) -> SimpleNamespace:
    """Returns hooks; the default ``update_pre`` clips their gradients."""
    hooks = small.hooks(create_model=lambda: Filter(dtype), **more)
    hooks.create_loss = lambda: lambda pair: 10.0 * small.squared_error(pair)
    del hooks.update_pre
    return hooks


def train_plainly(dtype: tf.DType) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the weights, and their moving averages over the steps."""
    model = Filter(dtype)
    variables = [model.weight, model.table]
    averages = [variable.numpy() for variable in variables]
    for inputs, target in small.create_dataset(small.BATCH).take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(10.0 * small.squared_error((model(inputs), target)))
        gradients = tape.gradient(loss, variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        squares = [np.sum(np.abs(tf.cast(each, tf.complex128)) ** 2) for each in gradients]
        norm = np.sqrt(np.sum(squares))
        assert norm > 10.0, "the clip has to clip"
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(tf.cast(RATE * 10.0 / norm, dtype) * gradient)
        averages = [
            AVERAGED * average + (1 - AVERAGED) * variable.numpy()
            for average, variable in zip(averages, variables, strict=True)
        ]
    return [variable.numpy() for variable in variables], averages


def assert_close(values: list[Any], expected: list[Any]) -> None:
    tolerance = 0.03 if values[0].dtype == tf.bfloat16 else 1e-4
    for value, other in zip(values, expected, strict=True):
        numbers, others = np.complex128(value), np.complex128(other)
        np.testing.assert_allclose(numbers, others, tolerance, tolerance)


@pytest.mark.parametrize(
    ("dtype", "way"),
    small.slow_but(
        (tf.complex64, "averages"),
        of=[
            *((tf.complex64, way) for way in WAYS),
            *((dtype, "three devices") for dtype in TRAINED if dtype != tf.complex64),
            (tf.bfloat16, "averages"),
            (tf.bfloat16, "logical replicas"),
        ],
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_a_weight_of_each_dtype_is_trained_and_resumed(
    train: engine.Train, runs: Path, dtype: tf.DType, way: str
) -> None:
    for steps in (STEPS // 2, STEPS):
        state = train(make_hooks(dtype), **small.settings(steps, log_every=1000), **WAYS[way])
    weights, averages = train_plainly(dtype)
    assert_close([state.train_model.weight.numpy(), state.train_model.table.numpy()], weights)
    if "ema" in WAYS[way]:
        saved = compare.read_checkpoint(runs / "run", STEPS, "engine")
        keys = (
            f"created/ema.SVariable{number}/.ATTRIBUTES/VARIABLE_VALUE" for number in ("", "#2")
        )
        assert_close([saved[key] for key in keys], averages)


@pytest.mark.slow
def test_every_kind_of_dtype_passes_the_check(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The check evaluates, exports and loads the model."""
    float8 = every_dtype.FLOAT8[0]
    states = [tf.int8, tf.uint64, tf.bfloat16, float8, tf.complex64, tf.qint8, tf.bool]
    hooks = every_dtype.hooks(states, [tf.float32, tf.float64, tf.complex64])
    hooks.create_eval_dataset = small.create_eval_dataset
    config = ctl_core.Config(**small.settings(4), runs_dir=str(runs), run_name="checked")
    ctl_core.check(hooks, config)
    output = capfd.readouterr().out
    assert "all well" in output
    assert "15 parameters to train" in output


def test_a_complex_weight_that_is_nan_ends_the_run_before_its_checkpoint(
    train: engine.Train,
) -> None:
    hooks = make_hooks(tf.complex64)
    nan = complex(0.0, np.nan)
    hooks.update_pre = lambda gradients: (
        [tf.convert_to_tensor(each) * nan for each in gradients],
        0,
    )
    with pytest.raises(ctl_core.RunError, match="weight is not finite") as refused:
        train(hooks, **small.settings(1, on_nan="stop"))
    assert "\n" not in str(refused.value)
