"""Fixtures of the golden tests."""

import functools
from pathlib import Path

import pytest

from tests.golden import engine, small

engine.start_devices()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Returns the folder for the runs of a test."""
    return tmp_path / "runs"


@pytest.fixture
def train(runs: Path) -> engine.Train:
    """Returns ``train(hooks, **settings)``, which trains in this process and returns the state."""
    return functools.partial(engine.train, runs=runs)


@pytest.fixture
def train_small(runs: Path) -> engine.Train:
    """Returns ``train_small(hooks, **settings)``, which trains six steps like ``small.plain``."""
    return functools.partial(engine.train, runs=runs, **small.settings(6))


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> engine.Command:
    """Returns ``command(*words, **environ)``: ``python -m ctl_core WORDS`` in the test's folder."""
    return engine.commands_here(tmp_path, monkeypatch, capfd)
