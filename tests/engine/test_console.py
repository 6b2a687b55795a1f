"""What is shown: on a terminal, in a pipe, in metrics.jsonl, in TensorBoard; the table of hooks."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console as Terminal

import ctl_core
from ctl_core.__main__ import main
from ctl_core.console import Console, activate, report, show_step
from ctl_core.table import TABLE
from ctl_core.tools.hook_table import print_table
from tests.helpers.cases import make_hooks, regression_data, sliced
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


@pytest.mark.parametrize(("environ", "colours"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color_leaves_out_the_colours(environ: dict[str, str], colours: bool) -> None:
    pretended, written = terminal(80, **environ)
    a_run(Console(pretended))
    codes = set(re.findall(r"\x1b\[([0-9;]*)m", written.getvalue()))
    # What is left may make text bold or faint, or reset it.
    assert any(int(n) >= 30 for code in codes for n in code.split(";") if n) == colours


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


def summaries(folder: Path) -> dict[tuple[int, str], float]:
    """Reads scalar summaries back: (step, name) -> value."""
    found = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                found[event.step, value.tag] = float(tf.make_ndarray(value.tensor))
    return found


def test_reports_go_to_metrics_and_tensorboard(train: Train, tmp_path: Path) -> None:
    def watch(step: Any, loss: Any, lr: Any, train_model: Any) -> None:
        report(
            tf.constant(step),
            loss=loss,
            lr=lr,
            odd=np.array([[0.5]]),
            nan=float("nan") if step == 4 else 1,
            infinite=-np.inf,
            flag=True,
            parts={"first": tf.constant(step), 2: np.float32(0.25)},
        )
        tf.summary.scalar("own", 7.0)

    losses: list[float] = []
    state = train(
        make_hooks(
            every_steps={
                1: lambda loss: losses.append(float(loss)),
                2: ctl_core.deferred(lambda step: show_step(step)),
                4: watch,
            },
            create_eval_dataset=lambda: sliced(regression_data())(50),
        ),
        steps=8,
        eval_every=4,
    )
    lines = [json.loads(line) for line in (state.run_dir / "metrics.jsonl").open()]
    assert [(line.pop("step"), line.pop("split")) for line in lines] == [
        (4, "train"),
        (4, "eval"),
        (8, "train"),
        (8, "eval"),
    ]
    inputs, target = regression_data()
    final = float(np.mean(np.sum((state.train_model(inputs) - target) ** 2, axis=1)))
    expected = {
        step: {
            "loss": losses[step - 1],
            "lr": 0.01,
            "odd": 0.5,
            "nan": None if step == 4 else 1.0,
            "infinite": None,
            "flag": 1.0,
            "parts/first": float(step),
            "parts/2": 0.25,
        }
        for step in (4, 8)
    }
    assert lines[0] == pytest.approx(expected[4]) and lines[2] == pytest.approx(expected[8])
    assert lines[3] == pytest.approx({"loss": final}, rel=1e-5)

    shown = summaries(state.run_dir / "tb" / "train")
    assert {key for key in shown if key[1] != "own" and "progress/" not in key[1]} == {
        (step, name) for step in (4, 8) for name in expected[step]
    }
    assert math.isnan(shown[4, "nan"]) and shown[4, "infinite"] == -math.inf
    assert (shown[4, "own"], shown[8, "own"]) == (7.0, 7.0), "tf.summary works in a hook"
    assert shown[4, "progress/learning_rate"] == pytest.approx(0.01)
    for (step, name), value in shown.items():
        plain = expected.get(step, {}).get(name)
        if plain is not None:
            assert value == pytest.approx(plain)
    assert summaries(state.run_dir / "tb" / "eval")[8, "loss"] == pytest.approx(final, rel=1e-5)
    log = (state.run_dir / "train.log").read_text()
    assert "INFO step 4/8  loss" in log and "done: step 8" in log


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


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("pipe", [True, False])
def test_the_table_lists_every_hook_at_any_width(width: int, pipe: bool) -> None:
    written = io.StringIO()
    print_table(Terminal(file=written, width=width, force_terminal=not pipe, _environ={}))
    text = written.getvalue()
    assert ("\x1b" in text) == (not pipe) and "\r" not in text
    lines = ESCAPE.sub("", text).splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    blocks = dict(block.split("\n", 1) for block in "\n".join(lines).split("\n\n")[: len(TABLE)])
    assert list(blocks) == [s.name + (" (required)" if s.required else "") for s in TABLE]
    for spec, block in zip(TABLE, blocks.values(), strict=True):
        words = " ".join(block.split())
        for part in (spec.doc, spec.returns, spec.default, ", ".join(spec.arguments)):
            assert part == "–" or " ".join(part.split()) in words
