"""The programs by name, and what each is compared with."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any

import numpy as np

from tests.golden import compare, programs
from tests.golden.compare import BATCH, RATE, STEPS, Program

NAMES = [name for _, name, _ in pkgutil.iter_modules(programs.__path__)]
SETTINGS: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE}
KILLED, LAST_SAVED = 11, 8


def load_program(name: str) -> Program:
    """Imports a program only when it is asked for: some start TensorFlow."""
    module = importlib.import_module(f"{programs.__name__}.{name}")
    return module.PROGRAM  # type: ignore[no-any-return]


@functools.cache
def train_plainly(name: str) -> list[np.ndarray]:
    return load_program(name).plain_weights()


def assert_plain(name: str, weights: Iterable[Any], metrics: Any) -> None:
    """Compares what a program has trained, and its evaluation, with its plain loop's."""
    program = load_program(name)
    bounds = program.tolerance, program.absolute
    compare.assert_close(weights, train_plainly(name), program.ignored(), *bounds)
    for metric, value in program.metrics().items():
        np.testing.assert_allclose(metrics[metric], value, rtol=1e-5, err_msg=metric)
