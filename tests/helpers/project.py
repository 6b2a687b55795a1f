"""Training in this process: by hooks, or by a project's command line; what its commands leave.

Devices are fixed before TensorFlow starts, so that one process can test 1, 2 and 4 replicas.
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
    """Returns the number of the one line that holds the fragment."""
    (number,) = [n for n, line in enumerate(source.splitlines(), 1) if fragment in line]
    return number


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Returns ``train(hooks, **settings)``, with small settings and a run folder of the test's."""
    return functools.partial(engine.train, runs=tmp_path / "runs", steps=20)


Cli = Callable[..., engine.Outcome]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Returns ``cli(source, *flags)``, which runs a command in a project with that callbacks.py."""
    run = engine.commands_here(tmp_path, monkeypatch, capfd)

    def function(
        source: str | None, *flags: str, command: Sequence[str] = ("train", *FLAGS)
    ) -> engine.Outcome:
        if source is not None:
            (tmp_path / "callbacks.py").write_text(source)
        return run(*command, *flags)

    return function


def refused(outcome: engine.Outcome, *words: str) -> None:
    """Checks that a command was refused in one line with these words."""
    failed(outcome, *words, code=2)


def failed(outcome: engine.Outcome, *words: str, code: int = 1) -> None:
    """Checks that a run failed, with one line that has these words."""
    lines = outcome.err.splitlines()
    assert (outcome.code, len(lines)) == (code, 1), outcome
    assert lines[0].startswith("error: ") and "Traceback" not in outcome.out
    for word in words:
        assert word in lines[0]


EVALUATED = small.CALLBACKS + small.EVALUATED
