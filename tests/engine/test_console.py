"""What is shown: on a terminal, in a pipe, in metrics.jsonl, in TensorBoard; the table of hooks."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from rich.console import Console as Terminal

import ctl_core
from ctl_core.__main__ import main
from ctl_core.console import Console, activate, report
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONG = "a name [red]of some length[/] :smile:"


def terminal(width: int, **environ: str) -> tuple[Terminal, io.StringIO]:
    """Returns a pretended terminal, and what is written to it."""
    written = io.StringIO()
    environ = {"TERM": "xterm-256color", **environ}
    return Terminal(force_terminal=True, width=width, file=written, _environ=environ), written


def screen(text: str) -> list[str]:
    """Returns the lines that the progress line and messages take, without escape codes."""
    return [line for line in re.split(r"[\r\n]+", ESCAPE.sub("", text)) if line.strip()]


def a_run(console: Console, steps: int = 1000) -> None:
    """Shows a run of some steps with values, messages and an evaluation."""
    console.start(0, steps)
    for step in range(1, steps + 1):
        console.step(step)
        if step % 100 == 0:
            console.values(step, "train", {"loss": 1.0 / step, LONG: 12345.678})
    console.stop()


@pytest.mark.parametrize("width", [10, 20, 40, 60, 80, 200])
def test_the_progress_line_stays_within_the_terminal(width: int) -> None:
    pretended, written = terminal(width)
    a_run(Console(pretended))
    lines = screen(written.getvalue())
    assert lines and max(map(len, lines)) <= width
    if width >= 20:
        assert lines[-1].startswith("step 1000/1000")
    if width >= 40:
        assert "loss 0.001" in lines[-1]
    if width >= 200:
        assert f"loss 0.001  {LONG} 1.235e+04" in lines[-1], "no markup, no emoji"


def test_messages_appear_above_the_progress_line_as_they_are() -> None:
    pretended, written = terminal(40)
    console = Console(pretended)
    console.start(0, 10)
    console.warn(f"{LONG} and then some more words than the terminal has columns")
    console.values(5, "eval", {"accuracy": 0.5})
    console.step(10)
    console.stop()
    console.say("done")
    lines = screen(written.getvalue())
    assert f"warning: {LONG} and then some more words than the terminal has columns" in lines
    assert "step 5/10  eval: accuracy 0.5" in lines
    assert lines[-1] == "done" and lines[-2].startswith("step 10/10")


def test_a_dumb_terminal_gets_plain_lines() -> None:
    pretended, written = terminal(80, TERM="dumb")
    a_run(Console(pretended))
    assert "\x1b" not in written.getvalue() and "\r" not in written.getvalue()
    assert len(written.getvalue().splitlines()) <= 15


def test_in_a_pipe_there_are_plain_lines(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    """The default hooks: a line for each loss, and no line for each step."""
    train(make_hooks(every_steps=ctl_core.defaults.every_steps), steps=40)
    out, err = capfd.readouterr()
    assert err == "" and "\x1b" not in out and "\r" not in out
    lines = out.splitlines()
    losses = [line for line in lines if re.match(r"step \d+/40  loss [0-9.e+-]+(  |$)", line)]
    assert [int(re.split("[ /]", line)[1]) for line in losses] == [10, 20, 30, 40]
    others = [line for line in lines if line not in losses]
    assert "training, to step 40, batch size 16, 1 replica on CPU" in others[0]
    assert others[-1].startswith("done: step 40")


def test_a_pipe_that_knows_only_ascii(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["train", "--run-name", "ümlaut"]) == 2
    assert stderr.buffer.getvalue().endswith(b"got '?mlaut'.\n")  # type: ignore[attr-defined]
    assert main(["hooks"]) == 0
    assert b"per_replica_batch_size" in stdout.buffer.getvalue()  # type: ignore[attr-defined]


def test_the_default_hooks_report_several_losses(train: Train) -> None:
    """``loss`` is a dict by objective then."""
    report(3, loss={"a": 1.0, "b": tf.constant(2.0)})
    console = Console()
    seen: list[Any] = []
    console.listeners.append(lambda *values: seen.append(values))
    activate(console)
    try:
        ctl_core.defaults.print_loss(5, {"a": 1.0, "b": tf.constant(2.0)})
    finally:
        activate(None)
    assert seen == [(5, "train", {"loss/a": 1.0, "loss/b": 2.0})]
