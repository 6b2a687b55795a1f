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


def assert_ended_at_once(folder: Path) -> None:
    """It is noted as one that was stopped, by a person, and not as one that has failed."""
    log = (folder / "train.log").read_text()
    assert log.count("ERROR interrupted") == 1 and "Traceback" not in log


def test_a_later_second_sigint_leaves_an_endless_loop_in_a_hook(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "SAME_SIGNAL", 0.0)
    monkeypatch.setattr(signals, "HEED", 60.0)

    def endless() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
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
    if Path("block").exists():
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
FLAGS = "--batch-size=16 --steps=20 --ckpt-every=3 --run-name=a --learning-rate=0.01"
# A shell starts what it runs in the background without SIGINT.
PROGRAM = """
import signal, sys
from ctl_core.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""


@pytest.mark.slow
def test_a_second_sigint_ends_a_blocked_graph_call_and_the_run_goes_on(
    train: Train, tmp_path: Path
) -> None:
    (tmp_path / "callbacks.py").write_text(BLOCKED.format(root=str(ROOT)))
    command = [sys.executable, "-c", PROGRAM, "train", *FLAGS.split()]
    environ, pipe = {**os.environ, "PYTHONPATH": PYTHONPATH}, subprocess.PIPE
    run = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=pipe, stderr=pipe, text=True)
    limit = time.monotonic() + 300
    while not (tmp_path / "blocked").exists():  # after step 8
        assert run.poll() is None and time.monotonic() < limit, run.communicate()
        time.sleep(0.02)

    assert run.stdout is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        run.send_signal(number)
        said = next(line for line in run.stdout if "SIG" in line)
        assert said.startswith(f"{number.name}: the run stops after what is running now, and is ")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # none of them means a second
        run.send_signal(number)
        time.sleep(0.05)
    time.sleep(signals.SAME_SIGNAL)
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=300)
    assert (run.returncode, out) == (130, "")
    assert err.splitlines()[-1:] == ["error: interrupted"]

    assert_ended_at_once(tmp_path / "runs" / "a")
    hooks = make_hooks(every_steps={1: lambda step, loss: None})
    parts = train(hooks, run_name="a")
    whole = train(hooks, run_name="whole")
    assert "resuming at step 6" in (tmp_path / "runs" / "a" / "train.log").read_text()
    assert_weights(parts, whole, rtol=0)
