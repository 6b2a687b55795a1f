"""``--tensorboard``: it serves, ends with the training however that ends, and shows the runs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import ctl_core
from ctl_core.tensorboard import command
from tests.helpers.browser import browser, chromium
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import Cli, refused, source_of

ROOT = str(Path(ctl_core.__file__).parents[1])
SOURCE = source_of(
    every_steps="""\
import time


def look(step, loss):
    ctl_core.report(step, loss=loss)
    picture = np.full((1, 8, 8, 3), (255, 0, 0), "uint8")
    tf.summary.image("squares", picture, step=step)


def wait(hparams):
    time.sleep(hparams.get("wait", 0))


every_steps = {1: [look, wait]}
""",
    more="""\
def create_eval_dataset(per_replica_batch_size):
    return data.batch(per_replica_batch_size)
""",
)
TRAIN = ["train", "--batch-size", "8", "--steps", "1000", "--hparams.wait", "0.1", "--tensorboard"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tensorboard", "maybe"), "tensorboard: expected true, false or keep, got 'maybe'"),
        (("--tensorboard", "--check"), "tensorboard: a check is no run; leave one out."),
        (("--tensorboard", "keep", "--background"), "tensorboard: keep waits for Ctrl-C"),
    ],
)
def test_what_makes_no_sense_is_refused(cli: Cli, words: tuple[str, ...], said: str) -> None:
    refused(cli(SOURCE, *words), said)


def test_where_it_is_not_installed_a_line_says_what_installs_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctl_core.tensorboard.PACKAGE", "a_package_that_is_not_there")
    refused(cli(SOURCE, "--tensorboard"), "not installed", "-m pip install --editable .")


def boards(folder: Path) -> list[str]:
    """The command lines of the processes that serve runs of a folder, and of what they started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if any(str(folder / "runs") in word for word in words):
            found.append(" ".join(words))
    return found


def until(condition: Callable[[], Any], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def start(folder: Path, *words: str) -> tuple[subprocess.Popen[str], str]:
    """Starts a training; returns its process, and where its TensorBoard serves once it does."""
    (folder / "callbacks.py").write_text(SOURCE)
    process = subprocess.Popen(
        [sys.executable, "-m", "ctl_core", *TRAIN, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.fullmatch(
            r"TensorBoard: (http://localhost:\d+/) has the runs in runs\n", line
        ):
            return process, found[1]
    raise AssertionError("no TensorBoard")


def runs_at(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}data/runs", timeout=600) as answer:
        return list(json.load(answer))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
def test_it_serves_at_a_free_port_and_ends_with_a_training_that_is_killed_or_stopped(
    tmp_path: Path,
) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TensorBoard does
        try:
            taken.bind(("127.0.0.1", 6006))
            taken.listen()
        except OSError:  # another program has it
            assert taken.fileno() >= 0
        killed, url = start(tmp_path, "--run-name", "a")
        assert url != "http://localhost:6006/"
        until(lambda: "a/tb/train" in runs_at(url))
        assert boards(tmp_path)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        until(lambda: not boards(tmp_path))
    stopped, url = start(tmp_path, "--run-name", "a", "--steps", "2000")
    assert stopped.stdout is not None
    assert any("loss" in line for line in stopped.stdout)
    stopped.send_signal(signal.SIGINT)
    out, _ = stopped.communicate(timeout=600)
    assert stopped.returncode == 130 and "stopped by SIGINT, saved" in out
    assert out.endswith("and --tensorboard keep lets it go on.\n")
    (said,) = re.findall(r"with the training: (.+) --logdir runs shows", out)
    helped = subprocess.run([*said.split(), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert helped.returncode == 0 and "--logdir" in helped.stdout
    until(lambda: not boards(tmp_path))


def test_the_command_that_is_named_works_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest of those that start the TensorBoard of this Python."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    own = project / ".venv" / "bin"
    for folder in (own, elsewhere):
        folder.mkdir(parents=True)
        for name in ("python", "tensorboard"):
            (folder / name).touch(0o755)
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    for path, words in (
        (own, "tensorboard"),
        (elsewhere, ".venv/bin/python -m tensorboard.main"),
        (tmp_path, ".venv/bin/python -m tensorboard.main"),
    ):
        monkeypatch.setenv("PATH", str(path))
        assert command() == words
    (own / "tensorboard").unlink()
    monkeypatch.setenv("PATH", f"{own}{os.pathsep}{elsewhere}")
    assert command() == "python -m tensorboard.main"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(elsewhere))
    assert command() == "project/.venv/bin/python -m tensorboard.main"


@pytest.mark.slow
def test_kept_it_goes_on_after_the_training_until_ctrl_c(tmp_path: Path) -> None:
    process, url = start(tmp_path, "keep", "--run-name", "a", "--steps", "3")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("TensorBoard goes on"):
            break
    assert url in line
    assert (tmp_path / "runs/a/process.json").read_text().count('"done"') == 1
    until(lambda: "a/tb/eval" in runs_at(url))
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == 0
    until(lambda: not boards(tmp_path))


@pytest.fixture
def board(cli: Cli, tmp_path: Path) -> Iterator[str]:
    """Two runs, and where TensorBoard serves them."""
    chromium()
    settings = ("--steps", "40", "--eval-every", "10")
    assert cli(SOURCE, *settings, "--lr-schedule", "cosine", "--warmup", "8").code == 0
    more = ("--run-name", "b", "--learning-rate", "0.004", "--hparams.width", "64")
    assert cli(None, *settings, *more).code == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "ctl_core.tensorboard", str(tmp_path / "runs")],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "-1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    url, _ = json.loads(process.stdout.readline())
    yield url
    process.stdin.close()
    assert process.wait(600) == 0


@pytest.mark.slow
def test_two_runs_in_a_browser(board: str, tmp_path: Path) -> None:
    """Curves, pictures, and settings with the last metrics, as a page shows them."""
    until(lambda: {"a/tb", "a/tb/train", "b/tb/eval"} <= {*runs_at(board)})
    with browser(tmp_path / "browser") as page:
        curves = ("loss", "progress", "/learning_rate", "/examples_per_second", "squares")
        page.open(f"{board}#timeseries", "a/tb/train", "a/tb/eval", "b/tb/train", *curves)
        page.screenshot(tmp_path / "timeseries.png")
        page.open(f"{board}#scalars", "b/tb/eval", "tag: loss")
        page.screenshot(tmp_path / "scalars.png")
        page.open(f"{board}#images", "squares", "a/tb/train", "b/tb/train")
        page.screenshot(tmp_path / "images.png")
        last = [json.loads(line) for line in (tmp_path / "runs/b/metrics.jsonl").open()][-1]
        assert last["split"] == "eval"
        settings = ("learning_rate", "0.0010000", "0.0040000", "lr_schedule", "cosine")
        page.open(f"{board}#hparams", *settings, "eval.loss", f"{last['loss']:#.5g}")
        page.screenshot(tmp_path / "hparams.png")
    seen = {
        name: np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB")).astype(int)
        for name in ("timeseries", "scalars", "images", "hparams")
    }
    for name, pixels in seen.items():  # the bar of TensorBoard is above all of them
        assert (abs(pixels - (245, 124, 0)).sum(2) < 20).sum() > 20_000, name
    assert (seen["images"] == (255, 0, 0)).all(2).sum() > 10_000
    for name in (
        "timeseries",
        "scalars",
    ):  # beside the settings on the left, only curves have colours
        chart = seen[name][140:600, 380:1100]
        assert ((chart.max(2) - chart.min(2)) > 60).sum() > 300, name
