"""Comparisons of variables and of checkpoints."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf


def read_numbers(variables: Iterable[Any]) -> list[np.ndarray]:
    """Returns Keras variables, TensorFlow variables or arrays as NumPy arrays."""
    return [np.array(each.numpy() if hasattr(each, "numpy") else each) for each in variables]


def assert_close(
    variables: Iterable[Any],
    expected: Iterable[Any],
    tolerance: float = 1e-5,
    absolute: float = 1e-6,
) -> None:
    """Asserts that variables are close to the expected ones, in the same order."""
    for value, other in zip(variables, expected, strict=True):
        numbers, others = read_numbers([value, other])
        np.testing.assert_allclose(numbers, others, tolerance, absolute, err_msg=find_path(other))


def assert_same(variables: Iterable[Any], expected: Iterable[Any]) -> None:
    """Asserts that variables equal the expected ones bit for bit, in the same order."""
    for value, other in zip(read_numbers(variables), read_numbers(expected), strict=True):
        np.testing.assert_array_equal(value, other)


def find_path(variable: Any) -> str:
    """Returns the path of a variable with its layers, for example ``dense/kernel``."""
    return str(getattr(variable, "path", getattr(variable, "name", "")))


def read_checkpoint(run: Path, step: int, subfolder: str = "") -> dict[str, np.ndarray]:
    """Returns every tensor of a step's checkpoint by its key, read without the engine.

    Args:
        run: the folder of the run
        step: the step of the checkpoint
        subfolder: ``engine`` for the engine's own part of the checkpoint
    """
    reader = tf.train.load_checkpoint(str(run / "ckpt" / subfolder / f"ckpt-{step}"))
    return {
        key: reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key != "_CHECKPOINTABLE_OBJECT_GRAPH" and "save_counter" not in key
    }


def assert_same_checkpoint(run: Path, other: Path, step: int) -> None:
    """Asserts that the checkpoints of two runs at a step are equal bit for bit."""
    saved, expected = (read_checkpoint(folder, step) for folder in (run, other))
    assert saved.keys() == expected.keys()
    assert len(saved) > 1
    for key, value in expected.items():
        np.testing.assert_array_equal(saved[key], value, err_msg=key)
