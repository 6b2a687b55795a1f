"""What the weights of a ported program are compared with.

Each program stands here twice: as hooks, and as the loop of one device that people write. Weights
are compared, all that the model has; plain SGD shows a wrong scale that an adaptive one hides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

STEPS, BATCH, RATE = 16, 8, 0.05

Numbers = list[tuple[str, np.ndarray]]


def numbers(variables: Iterable[Any]) -> Numbers:
    """Returns the names and numbers of Keras or TensorFlow variables."""
    return [(variable.name, np.array(variable.numpy())) for variable in variables]


def assert_close(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Compares a program's variables with the plain loop's, one after the other."""
    for (name, value), (_, other) in zip(numbers(found), numbers(expected), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6, err_msg=name)


def assert_moved(before: Numbers, after: Numbers) -> None:
    """So that equal weights mean something: training has changed each of them visibly."""
    still = [
        name
        for (name, one), (_, other) in zip(before, after, strict=True)
        if np.abs(one - other).max() < 1e-4
    ]
    assert not still, f"these weights stay where they are: {still}"
