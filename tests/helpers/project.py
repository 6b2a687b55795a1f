"""A small project for the command line, trained in this process; what its commands leave behind."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.golden import engine, small

# A project that trains: 40 examples of 2 features, global batches of 8.
PIECES = {
    "imports": """\
import keras
import numpy as np
import tensorflow as tf

import ctl_core

x = np.arange(80, dtype="float32").reshape(40, 2) / 80
y = x.sum(1, keepdims=True)
data = tf.data.Dataset.from_tensor_slices((x, y))
""",
    "create_dataset": """\
def create_dataset(per_replica_batch_size):
    return data.batch(per_replica_batch_size, drop_remainder=True)
""",
    "create_model": """\
def create_model():
    kernel = keras.initializers.Constant(0.5)
    return keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer=kernel, name="dense")]
    )
""",
    "create_loss": """\
def create_loss():
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2)
""",
    "every_steps": "every_steps = {}\n",
}


FLAGS = ("--steps", "10", "--batch-size", "8", "--run-name", "a")


def read_hooks_source(**pieces: str | None) -> str:
    """Returns a callbacks.py: the pieces above, some replaced, left out or added."""
    return "\n\n".join(piece for piece in {**PIECES, **pieces}.values() if piece is not None)


def line_of(source: str, fragment: str) -> int:
    """Returns the number of the one line that holds the fragment."""
    (number,) = [n for n, line in enumerate(source.splitlines(), 1) if fragment in line]
    return number


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


# What a test adds to a callbacks.py goes below it.
REGRESSION = small.CALLBACKS
EVALUATED = REGRESSION + small.EVALUATED
