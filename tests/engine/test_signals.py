"""SIGTERM and SIGINT at special moments: the run is saved, and goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from ctl_core import checkpoint, trainer
from ctl_core.cluster import signals
from tests.helpers.cases import assert_weights, make_hooks, regression_data, small_model
from tests.helpers.fixtures import Train
from tests.helpers.lean import PYTHONPATH

ROOT = Path(__file__).parents[2]

SETTINGS = {"ckpt_every": 4, "eval_every": 6}
Kill = Callable[[], None]


def shuffled(per_replica_batch_size: int) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(regression_data())
    return dataset.shuffle(40, seed=3).batch(per_replica_batch_size)


def batched(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(regression_data()).batch(per_replica_batch_size)


def hooks_with(during: str, kill: Kill, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hooks that call ``kill`` once, during what the name says."""
    left = [kill]

    def once(moment: str) -> bool:
        if moment == during and left:
            left.pop()()
        return True

    write = checkpoint.write_record
    monkeypatch.setattr(checkpoint, "write_record", lambda *of: once("saving") and write(*of))
    return make_hooks(
        create_dataset=shuffled,
        create_model=lambda: once("creation") and small_model(),
        input_pre=lambda batch: once("tracing") and batch[0],
        create_eval_dataset=batched,
        after_eval=lambda step: step and once("evaluation"),
        every_steps={1: lambda step, loss: step == 5 and once("step")},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("during", "stops_at", "number"),
    [
        ("creation", 0, signal.SIGTERM),
        ("tracing", 0, signal.SIGINT),
        ("saving", 5, signal.SIGTERM),  # the next time that all are asked
        ("evaluation", 6, signal.SIGINT),
    ],
)
def test_a_signal_at_any_moment_saves_and_the_run_goes_on(
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    during: str,
    stops_at: int,
    number: signal.Signals,
) -> None:
    def kill_twice() -> None:  # as a process manager does that signals supervisor and workers
        signal.raise_signal(number)
        signal.raise_signal(number)

    hooks = hooks_with(during, kill_twice, monkeypatch)
    stopped = train(hooks, steps=12, run_name="parts", **SETTINGS)
    assert (stopped.step, stopped.stopped_by) == (stops_at, number)
    parts = train(hooks, steps=12, run_name="parts", **SETTINGS)
    assert parts.step == 12 and parts.stopped_by is None
    whole = train(hooks, steps=12, run_name="whole", **SETTINGS)
    assert_weights(parts, whole, rtol=0)
    assert (parts.run_dir / "metrics.jsonl").read_text() == (
        whole.run_dir / "metrics.jsonl"
    ).read_text()


def test_sigterm_however_often_and_sigint_once_do_not_cut_a_save_short(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "SAME_SIGNAL", 0.0)

    def kill_often() -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
            time.sleep(0.01)

    hooks = hooks_with("saving", kill_often, monkeypatch)
    stopped = train(hooks, steps=12, **SETTINGS)
    assert (stopped.step, stopped.stopped_by) == (5, signal.SIGTERM)
    assert (stopped.run_dir / "ckpt/engine/ckpt-5.json").exists()


def assert_ended_at_once(folder: Path) -> None:
    """It is noted as one that was stopped, by a person, and not as one that has failed."""
    log = (folder / "train.log").read_text()
    assert log.count("ERROR interrupted") == 1 and "Traceback" not in log


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_later_second_sigint_leaves_an_endless_loop_in_a_hook(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: signal.Signals
) -> None:
    monkeypatch.setattr(trainer, "SAME_SIGNAL", 0.0)
    monkeypatch.setattr(signals, "HEED", 60.0)

    def endless() -> None:
        for number in (first, signal.SIGINT, signal.SIGINT):
            signal.raise_signal(number)
            time.sleep(0.05)
        while True:
            time.sleep(600)

    hooks = hooks_with("step", endless, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(hooks, steps=12, **SETTINGS)
    assert_ended_at_once(tmp_path / "runs" / "run")
    state = train(hooks, steps=12, **SETTINGS)
    assert state.step == 12
    steps = [json.loads(x)["step"] for x in (state.run_dir / "metrics.jsonl").open()]
    assert steps == sorted(steps)


# A step blocks as soon as it is told to: a graph call that does not end.
BLOCKED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import tensorflow as tf
from tests.helpers.cases import *

def wait(inputs):
    if Path("block").exists() and {blocked}:
        Path("blocked").touch()
        while True:
            time.sleep(600)
    return inputs

def input_pre(batch):
    return tf.ensure_shape(tf.numpy_function(wait, [batch[0]], tf.float32), batch[0].shape)

def block(step):
    Path("block").touch()

create_dataset = sliced(regression_data())
create_model = small_model
create_loss = lambda: squared_error
every_steps = {{1: lambda step, loss: None}}
at_step = {{8: block}}
"""
FLAGS = (
    "--batch-size=16",
    "--steps=20",
    "--ckpt-every=3",
    "--run-name=a",
    "--learning-rate=0.01",
)


def start_blocked(folder: Path, blocked: str, *flags: str) -> subprocess.Popen[str]:
    """Starts a run and waits until it is blocked, after step 8."""
    source = BLOCKED.format(root=str(ROOT), blocked=blocked)
    (folder / "callbacks.py").write_text(source)
    command = [sys.executable, "-c", "import signal, sys; from ctl_core.__main__ import main\n"
        # a shell starts what it runs in the background without SIGINT
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    pipe = subprocess.PIPE
    run = subprocess.Popen(
        [*command, "train", *FLAGS, *flags],
        cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True,
    )  # fmt: skip
    until((folder / "blocked").exists, run)
    return run


def until(condition: Callable[[], bool], run: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 300
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def line_with(word: str, run: subprocess.Popen[str]) -> str:
    """Reads on until there is a line with the word."""
    assert run.stdout is not None
    return next(line for line in run.stdout if word in line)


def end_blocked(run: subprocess.Popen[str]) -> None:
    """Stops a blocked run as a person does, and checks what it says."""
    run.send_signal(signal.SIGTERM)
    assert (
        line_with("SIG", run) == "SIGTERM: the run stops after what is running now, and is saved.\n"
    )
    run.send_signal(signal.SIGINT)
    assert "SIGINT: the run stops after what is running now" in line_with("SIG", run)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # none of them means a second
        run.send_signal(number)
        time.sleep(0.05)
    time.sleep(signals.SAME_SIGNAL)
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=300)
    assert (run.returncode, out) == (130, "")
    assert err.splitlines()[-1:] == ["error: interrupted"]


@pytest.mark.slow
def test_a_second_sigint_ends_a_blocked_graph_call_and_the_run_goes_on(
    train: Train, tmp_path: Path
) -> None:
    end_blocked(start_blocked(tmp_path, "True"))
    assert_ended_at_once(tmp_path / "runs" / "a")
    hooks = make_hooks(every_steps={1: lambda step, loss: None})
    parts = train(hooks, run_name="a")
    whole = train(hooks, run_name="whole")
    assert "resuming at step 6" in (tmp_path / "runs" / "a" / "train.log").read_text()
    assert_weights(parts, whole, rtol=0)


@pytest.mark.cluster
def test_a_cluster_of_which_one_process_is_blocked_ends_by_a_second_sigint(tmp_path: Path) -> None:
    one = '\'"index": 1\' in __import__("os").environ["TF_CONFIG"]'
    end_blocked(start_blocked(tmp_path, one, "--workers=2"))
    assert (tmp_path / "runs/a/ckpt/engine/ckpt-6.json").exists()
