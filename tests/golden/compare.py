"""Comparing what was trained: variables, and what checkpoints hold."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf


def read_numbers(variables: Iterable[Any]) -> list[np.ndarray]:
    """Returns the numbers of Keras or TensorFlow variables, or of arrays."""
    return [np.array(each.numpy() if hasattr(each, "numpy") else each) for each in variables]


def assert_close(
    variables: Iterable[Any],
    expected: Iterable[Any],
    tolerance: float = 1e-5,
    absolute: float = 1e-6,
) -> None:
    """Compares variables with others, one after the other."""
    for value, other in zip(variables, expected, strict=True):
        numbers, others = read_numbers([value, other])
        np.testing.assert_allclose(numbers, others, tolerance, absolute, err_msg=find_path(other))


def assert_same(variables: Iterable[Any], expected: Iterable[Any]) -> None:
    """Compares variables with others bit for bit."""
    for value, other in zip(read_numbers(variables), read_numbers(expected), strict=True):
        np.testing.assert_array_equal(value, other)


def find_path(variable: Any) -> str:
    """Returns the names of a variable and of the layers around it, such as ``dense/kernel``."""
    return str(getattr(variable, "path", getattr(variable, "name", "")))


def read_checkpoint(run: Path, step: int, subfolder: str = "") -> dict[str, np.ndarray]:
    """Returns every tensor of the checkpoint of a step, by its key, read without the engine.

    Args:
        subfolder: ``engine`` for what the engine saves beside the hooks' objects
    """
    reader = tf.train.load_checkpoint(str(run / "ckpt" / subfolder / f"ckpt-{step}"))
    return {
        key: reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key != "_CHECKPOINTABLE_OBJECT_GRAPH" and "save_counter" not in key
    }


def assert_same_checkpoint(run: Path, other: Path, step: int) -> None:
    """Compares all that two runs have saved of a step, bit for bit."""
    saved, expected = (read_checkpoint(folder, step) for folder in (run, other))
    assert saved.keys() == expected.keys() and len(saved) > 1
    for key, value in expected.items():
        np.testing.assert_array_equal(saved[key], value, err_msg=key)
