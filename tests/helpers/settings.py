"""Settings resolved without a command: from flags, a config.yaml and an environment."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from ctl_core.commands.cli import Command, parse_command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CTL_")]:
        monkeypatch.delenv(name)
    return tmp_path


def parse(*words: str, config: str | None = None, **environ: str) -> Command:
    """Returns a command line as it is read with this config.yaml and environment."""
    if config is not None:
        Path("config.yaml").write_text(config)
    with mock.patch.dict(os.environ, environ):
        return parse_command(words)


def make_run(name: str, text: str = "seed: 0\n", age: int = 0) -> Path:
    """Writes the config.yaml of a run, so many seconds old."""
    run = Path("runs") / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(text)
    os.utime(run / "config.yaml", (10**9 - age, 10**9 - age))
    return run
