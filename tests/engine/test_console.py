"""What is shown on a terminal and in a pipe."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console as Terminal

import ctl_core
from ctl_core.run.console import Console
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONG = "a name [red]of some length[/] :smile:"


def terminal(width: int, term: str = "xterm-256color") -> tuple[Console, io.StringIO]:
    """Returns the console of a pretended terminal, and what is written to it."""
    written = io.StringIO()
    pretended = Terminal(force_terminal=True, width=width, file=written, _environ={"TERM": term})
    return Console(pretended), written


def screen(text: str) -> list[str]:
    """Returns the lines that the progress line and messages take, without escape codes."""
    return [line for line in re.split(r"[\r\n]+", ESCAPE.sub("", text)) if line.strip()]


def show_run(console: Console) -> None:
    console.start(0, 1000)
    for step in range(1, 1001):
        console.step(step)
        if step % 100 == 0:
            console.values(step, "train", {"loss": 1.0 / step, LONG: 12345.678})
    console.stop()


@pytest.mark.parametrize("width", [10, 40, 200])
def test_the_progress_line_stays_within_the_terminal(width: int) -> None:
    console, written = terminal(width)
    show_run(console)
    lines = screen(written.getvalue())
    assert lines and max(map(len, lines)) <= width
    if width >= 40:
        assert lines[-1].startswith("step 1000/1000") and "loss 0.001" in lines[-1]
    if width >= 200:
        assert f"loss 0.001  {LONG} 1.235e+04" in lines[-1], "no markup, no emoji"


def test_messages_appear_above_the_progress_line_as_they_are() -> None:
    console, written = terminal(40)
    console.start(0, 10)
    for _ in range(2):  # said once
        console.warn(f"{LONG} and then some more words than the terminal has columns")
    console.values(5, "eval", {"accuracy": 0.5})
    console.step(10)
    console.stop()
    console.say("done")
    lines = screen(written.getvalue())
    warning = f"warning: {LONG} and then some more words than the terminal has columns"
    assert lines.count(warning) == 1
    assert "step 5/10  eval: accuracy 0.5" in lines
    assert lines[-1] == "done" and lines[-2].startswith("step 10/10")


def test_a_dumb_terminal_gets_plain_lines() -> None:
    console, written = terminal(80, "dumb")
    show_run(console)
    assert "\x1b" not in written.getvalue() and "\r" not in written.getvalue()
    assert len(written.getvalue().splitlines()) <= 15


def test_in_a_pipe_there_are_plain_lines(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    """The default hooks: a line for each loss, and no line for each step."""
    train(make_hooks(every_steps=ctl_core.hooks.defaults.every_steps), steps=40)
    out, err = capfd.readouterr()
    assert err == "" and "\x1b" not in out and "\r" not in out
    first, *others = out.splitlines()
    assert "training, to step 40, batch size 16, 1 replica on CPU" in first
    losses = [line for line in others if re.match(r"step \d+/40  loss [0-9.e+-]+(  |$)", line)]
    assert [int(re.split("[ /]", line)[1]) for line in losses] == [10, 20, 30, 40]
    assert others[-1].startswith("done: step 40")
