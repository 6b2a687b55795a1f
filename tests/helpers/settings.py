"""Settings resolved without a command: from flags, a config.yaml and an environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ctl_core.cli import parse_command
from ctl_core.settings import Config

# Values of every type that an hparam may have.
TYPED = "hparams: {n: 3, x: 1.5, sure: true, t: base, l: [1], d: {n: 1}, nothing: null}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CTL_")]:
        monkeypatch.delenv(name)
    return tmp_path


def resolve(
    *flags: str, config: str | None = None, environ: dict[str, str] | None = None
) -> Config:
    """Returns the settings of ``train`` with these flags, config.yaml and environment."""
    if config is not None:
        Path("config.yaml").write_text(config)
    return parse_command(["train", *flags], environ or {}).config


def make_run(name: str, age: int, text: str = "") -> Path:
    run = Path("runs") / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(text)
    os.utime(run / "config.yaml", (10**9 - age, 10**9 - age))
    return run
