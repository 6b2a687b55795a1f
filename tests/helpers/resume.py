"""Comparing a run in one go with the same run in two parts, in all that is recorded."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import ctl_core
from tests.helpers.fixtures import Train


def values(state: ctl_core.State) -> dict[str, np.ndarray]:
    """Everything that is recorded, as it is on the first replica and in sum."""
    read = state.strategy.experimental_local_results
    return {
        path: np.sum([part.numpy() for part in read(variable)], axis=0)
        for path, variable in state.recording.variables.items()
    }


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def assert_resumes(
    train: Train, program: Callable[[], SimpleNamespace], **settings: Any
) -> dict[str, np.ndarray]:
    """Compares 12 steps in one go with 5 and 7, each by objects made anew; returns the former."""
    whole = values(train(program(), steps=12, run_name="whole", **settings))
    for steps in (5, 12):
        parts = values(train(program(), steps=steps, run_name="parts", **settings))
    assert_equal(parts, whole)
    return whole
