"""Fixtures of the golden tests."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.golden import FOLDER, NAME, ROOT, engine

engine.start_devices()


def pytest_report_header() -> str:
    return f"engine: {NAME}, in {FOLDER.relative_to(ROOT)}/ctl_core"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of the runs of a test."""
    return tmp_path / "runs"


@pytest.fixture
def train(runs: Path) -> engine.Train:
    """``train(hooks, **settings)`` trains in this process and returns the trained state."""
    return functools.partial(engine.train, runs=runs)
