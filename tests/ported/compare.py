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


def assert_close(
    found: Iterable[Any], expected: Iterable[Any], but: frozenset[int] = frozenset()
) -> None:
    """Compares a program's variables with the plain loop's, one after the other.

    Args:
        found, expected: the variables
        but: positions of those that ``rounding_only`` has found
    """
    pairs = zip(numbers(found), numbers(expected), strict=True)
    for position, ((name, value), (_, other)) in enumerate(pairs):
        if position not in but:
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6, err_msg=name)


def rounding_only(gradients: Iterable[list[Any]]) -> frozenset[int]:
    """Finds the weights whose true gradient is zero, by what a plain loop has worked out.

    Such as a bias that a softmax takes off again: its gradient is rounding, another on each number
    of devices, which Adam blows up to full steps. No bound fits it.

    Args:
        gradients: at each step, of each weight

    Returns:
        The positions of the weights of which no gradient was ever a millionth of the largest.
    """
    sizes = [[float(np.abs(one).max()) for one in of_step] for of_step in gradients]
    relative = np.array(sizes) / np.max(sizes, axis=1, keepdims=True)
    return frozenset(np.flatnonzero(relative.max(axis=0) < 1e-6).tolist())


def assert_moved(before: Numbers, after: Numbers) -> None:
    """So that equal weights mean something: training has changed each of them visibly."""
    still = [
        name
        for (name, one), (_, other) in zip(before, after, strict=True)
        if np.abs(one - other).max() < 1e-4
    ]
    assert not still, f"these weights stay where they are: {still}"
