"""The fixtures of tests that train: four virtual CPU devices, and ``train`` with small settings.

The devices are fixed before TensorFlow starts, so that one process can test 1, 2 and 4 replicas.
"""

import functools
from pathlib import Path

import pytest

from tests.golden import engine

engine.start_devices()
Train = engine.Train


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Returns ``train(hooks, **settings)``, with small settings and a run folder of the test's."""
    return functools.partial(engine.train, runs=tmp_path / "runs", steps=20)
