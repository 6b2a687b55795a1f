"""Commands about runs: in which order, in which room, and how a run is named wrongly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ctl_core import run_process
from ctl_core.__main__ import main
from ctl_core.cli import parse_command
from ctl_core.errors import SetupError

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs that have ended, and one that has measured nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, metrics in (
        ("worst", {"loss": 2.5, "accuracy": 0.25, "wins": 1.0}),
        ("best", {"loss": 0.5, "accuracy": 0.75, "wins": 3.0}),
        ("nothing", {}),
        ("middle", {"loss": 1.5, "accuracy": 0.5, "wins": 2.0}),
    ):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("seed: 0\n")
        run_process.begin(folder, os.getpid())
        run_process.end(folder, "done", "", 3, metrics)


def names(said: Said, *words: str) -> list[str]:
    assert main(["runs", *words]) == 0
    return [line.split()[0] for line in said.readouterr().out.splitlines()[1:] if line[0] != " "]


def refused(said: Said, *words: str) -> str:
    assert main(list(words)) == 2
    (line,) = said.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "order"),
    [
        (("--sort", "accuracy"), "best middle worst nothing"),
        (("--sort", "loss"), "best middle worst nothing"),
        (("--sort", "accuracy:min"), "worst middle best nothing"),
        (("--sort", "wins:max"), "best middle worst nothing"),
        (("--sort", "accuracy", "--reverse"), "worst middle best nothing"),
        (("--sort", "age"), "middle nothing best worst"),
        (("--reverse",), "worst best nothing middle"),
        (("--sort", "name"), "best middle nothing worst"),
        (("--sort", "name", "--reverse"), "worst nothing middle best"),
    ],
)
def test_runs_are_sorted_with_the_best_first(
    words: Sequence[str], order: str, capsys: Said
) -> None:
    """Whichever way is better; what has no value of it is last either way."""
    assert names(capsys, *words) == order.split()


def test_which_way_is_better_has_to_be_plain(capsys: Said) -> None:
    line = refused(capsys, "runs", "--sort", "wins")
    assert line.startswith("error: sort: say whether wins is better when it is higher or lower")
    assert "no run has a metric 'accurac'; did you mean 'accuracy'?" in refused(
        capsys, "runs", "--sort", "accurac:max"
    )


@pytest.mark.parametrize("width", [36, 40, 44, 60])
def test_a_name_and_its_value_stay_together(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["runs", "--sort", "accuracy"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= width for line in out.splitlines())
    for pair in ("accuracy 0.75", "loss 0.5", "wins 3"):
        assert pair in out
    first = out.splitlines()[1]
    assert first.startswith("best") and "accuracy 0.75" in first, "what they are sorted by is shown"


def test_a_pair_that_is_wider_than_its_room_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    name = "a_metric_with_a_name_of_many_words"
    run_process.begin(Path("runs/best"), os.getpid())
    run_process.end(Path("runs/best"), "done", "", 3, {name: 0.5})
    assert main(["runs", "--sort", f"{name}:max"]) == 0
    assert f"best{name}0.5" in "".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("stop", "stop: name the run, such as stop a; python -m ctl_core runs lists them."),
        ("logs", "logs: name the run, such as logs a; python -m ctl_core runs lists them."),
        ("logs best -n x", "lines: expected a whole number, got 'x'."),
        ("logs best -n", "lines: expected a value after it."),
        ("logs best more", "logs: unexpected word 'more'; --help shows its use."),
        ("stop best --timeout soon", "timeout: expected a number, got 'soon'."),
        ("runs best", "runs: unexpected word 'best'; --help shows its use."),
        ("runs --json=x", "json: takes no value, got 'x'."),
        ("runs --state don", "state: 'don'; did you mean 'done'?"),
        ("runs --state xyz", "state: 'xyz'; expected one of starting, running, done, ended, "),
        ("evaluate bset", "run_name: no run 'bset' in runs; did you mean 'best'?"),
        ("predict best --run-name worst", "run_name: name one run, not both 'best' and 'worst'."),
        ("export best worst", "unexpected word 'worst': settings are given as --name value, a run"),
        ("train best", "unexpected word 'best': settings are given as --name value, a run"),
    ],
)
def test_what_is_named_wrongly_is_told_in_our_words(words: str, said: str, capsys: Said) -> None:
    assert refused(capsys, *words.split()).startswith(f"error: {said}")


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_run_that_has_not_begun_is_told_from_none(command: str, capsys: Said) -> None:
    """``runs`` lists it: its start has failed in a hook, say."""
    folder = Path("runs", "failed")
    folder.mkdir()
    run_process.begin(folder, os.getpid())
    run_process.end(folder, "failed", "create_model: ValueError")
    assert "failed" in names(capsys)
    line = refused(capsys, command, "failed")
    assert (
        line.startswith("error: run_name: runs/failed has not begun yet") and "logs failed" in line
    )


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_a_run_is_named_by_a_word(command: str) -> None:
    """As ``logs`` and ``compare`` have it; by its flag, too, as a supervisor gives it."""
    for words in (["best"], ["--run-name", "best"], ["best", "--run-name", "best"]):
        found = parse_command([command, *words, "--checkpoint", "3"], {})
        assert found.config.run_name == "best" and found.run == Path("runs/best")
        assert found.options["checkpoint"] == 3
    with pytest.raises(SetupError, match="run_name: "):
        parse_command([command, ""], {})


@pytest.mark.parametrize("command", ["runs", "logs", "train", "evaluate", "tfrecords"])
def test_help_names_the_command_as_it_is_typed(command: str, capsys: Said) -> None:
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m ctl_core {command} ")
