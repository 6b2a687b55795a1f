"""How a run is named, rightly and wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctl_core.__main__ import main
from ctl_core.cli import parse_command
from ctl_core.errors import SetupError

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("worst", "best", "middle"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("seed: 0\n")


def refused(said: Said, *words: str) -> str:
    assert main(list(words)) == 2
    (line,) = said.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evaluate bset", "run_name: no run 'bset' in runs; did you mean 'best'?"),
        ("predict best --run-name worst", "run_name: name one run, not both 'best' and 'worst'."),
        ("export best worst", "unexpected word 'worst': settings are given as --name value, a run"),
        ("train best", "unexpected word 'best': settings are given as --name value, a run"),
    ],
)
def test_what_is_named_wrongly_is_told_in_our_words(words: str, said: str, capsys: Said) -> None:
    assert refused(capsys, *words.split()).startswith(f"error: {said}")


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_a_run_is_named_by_a_word(command: str) -> None:
    """Or by its flag."""
    for words in (["best"], ["--run-name", "best"], ["best", "--run-name", "best"]):
        found = parse_command([command, *words, "--checkpoint", "3"], {})
        assert found.config.run_name == "best" and found.run == Path("runs/best")
        assert found.options["checkpoint"] == 3
    with pytest.raises(SetupError, match="run_name: "):
        parse_command([command, ""], {})


@pytest.mark.parametrize("command", ["train", "evaluate", "hooks"])
def test_help_names_the_command_as_it_is_typed(command: str, capsys: Said) -> None:
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m ctl_core {command} ")
