"""Fixtures that train in this process, with hooks or with a project's commands.

The devices are created before TensorFlow starts, so that one process can test several numbers of
replicas.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.golden import engine, small

engine.start_devices()
Train = engine.Train
FLAGS = ("--steps", "10", "--batch-size", "8", "--run-name", "a")


def line_of(source: str, fragment: str) -> int:
    """Returns the number of the only line that contains the fragment."""
    (number,) = [n for n, line in enumerate(source.splitlines(), 1) if fragment in line]
    return number


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Returns ``train(hooks, **settings)``, which trains 20 steps in a folder of the test."""
    return functools.partial(engine.train, runs=tmp_path / "runs", steps=20)


Cli = Callable[..., engine.Outcome]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Returns ``cli(source, *flags)``, which runs a command with ``source`` as callbacks.py."""
    run = engine.commands_here(tmp_path, monkeypatch, capfd)

    def function(
        source: str | None, *flags: str, command: Sequence[str] = ("train", *FLAGS)
    ) -> engine.Outcome:
        if source is not None:
            (tmp_path / "callbacks.py").write_text(source)
        return run(*command, *flags)

    return function


def refused(outcome: engine.Outcome, *words: str) -> None:
    """Asserts that a command was refused with one line that contains these words."""
    failed(outcome, *words, code=2)


def failed(outcome: engine.Outcome, *words: str, code: int = 1) -> None:
    """Asserts that a run failed with one line that contains these words."""
    lines = outcome.err.splitlines()
    assert (outcome.code, len(lines)) == (code, 1), outcome
    assert lines[0].startswith("error: ")
    assert "Traceback" not in outcome.out
    for word in words:
        assert word in lines[0]


EVALUATED = small.CALLBACKS + small.EVALUATED
