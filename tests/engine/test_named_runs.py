"""How a run is named, rightly and wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctl_core.cli import parse_command
from ctl_core.errors import SetupError


@pytest.fixture(autouse=True)
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("worst", "best", "middle"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("seed: 0\n")


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_a_run_is_named_by_a_word(command: str) -> None:
    """Or by its flag."""
    for words in (["best"], ["--run-name", "best"], ["best", "--run-name", "best"]):
        found = parse_command([command, *words, "--checkpoint", "3"], {})
        assert found.config.run_name == "best" and found.run == Path("runs/best")
        assert found.options["checkpoint"] == 3
    with pytest.raises(SetupError, match="run_name: "):
        parse_command([command, ""], {})
