"""Fixtures of the golden tests."""

from __future__ import annotations

import functools
import linecache
import os
import runpy
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tests.golden import engine, small

engine.start_devices()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of the runs of a test."""
    return tmp_path / "runs"


@pytest.fixture
def train(runs: Path) -> engine.Train:
    """``train(hooks, **settings)`` trains in this process and returns the trained state."""
    return functools.partial(engine.train, runs=runs)


@pytest.fixture
def train_small(runs: Path) -> engine.Train:
    """``train_small(hooks, **settings)`` trains as ``small.plain`` does, for six steps."""
    return functools.partial(engine.train, runs=runs, **small.settings(6))


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> engine.Command:
    """``command(*words, **environ)`` is ``python -m ctl_core WORDS`` in the test's folder.

    It runs in this process, which has TensorFlow imported already.
    """
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # callbacks.py changes within a second
    # Many runs of one process look to TensorFlow like one function that is traced again and again.
    monkeypatch.setattr(tf.get_logger(), "level", 40)

    def run(*words: str, **environ: str) -> engine.Outcome:
        sys.modules.pop("callbacks", None)
        linecache.clearcache()
        capfd.readouterr()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["ctl_core", *words])
            for name, value in environ.items():
                patch.setenv(name, value)
            runpy.run_module("ctl_core", run_name="__main__", alter_sys=True)
        return engine.Outcome(int(ended.value.code or 0), *capfd.readouterr())

    return run
