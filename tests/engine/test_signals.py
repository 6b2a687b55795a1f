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

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core import checkpoint, loop, signals
from tests.engine.conftest import Train, make_hooks, regression_data, small_model

SETTINGS = {"ckpt_every": 4, "eval_every": 6}
Kill = Callable[[], None]


def shuffled(per_replica_batch_size: int) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(regression_data())
    return dataset.shuffle(40, seed=3).batch(per_replica_batch_size)


def hooks_with(during: str, kill: Kill, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hooks that call ``kill`` once, during what the name says."""
    left = [kill]

    def once(*_: Any) -> None:
        if left:
            left.pop()()

    def create_model() -> keras.Model:
        if during == "creation":
            once()
        return small_model()

    def input_pre(batch: Any) -> Any:
        if during == "tracing":
            once()
        return batch[0]

    def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(regression_data()).batch(per_replica_batch_size)

    evaluate, write = loop.evaluate, checkpoint.write_record

    def evaluate_and_kill(*args: Any) -> Any:
        if during == "evaluation":
            once()
        return evaluate(*args)

    def write_and_kill(*args: Any) -> Any:
        if during == "saving":
            once()
        return write(*args)

    monkeypatch.setattr(loop, "evaluate", evaluate_and_kill)
    monkeypatch.setattr(checkpoint, "write_record", write_and_kill)
    return make_hooks(
        create_dataset=shuffled,
        create_model=create_model,
        input_pre=input_pre,
        create_eval_dataset=create_eval_dataset,
        every_steps={1: lambda step, loss: once() if (during, step) == ("step", 5) else None},
    )


@pytest.mark.parametrize(
    ("during", "stops_at", "number"),
    [
        ("creation", 0, signal.SIGTERM),
        ("tracing", 0, signal.SIGINT),
        ("saving", 5, signal.SIGTERM),  # the next time that all are asked
        ("saving", 5, signal.SIGINT),
        ("evaluation", 6, signal.SIGTERM),
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
    for one, other in zip(
        parts.train_model.get_weights(), whole.train_model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert (parts.run_dir / "metrics.jsonl").read_text() == (
        whole.run_dir / "metrics.jsonl"
    ).read_text()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_later_second_signal_is_not_held_back(
    train: Train, monkeypatch: pytest.MonkeyPatch, second: signal.Signals
) -> None:
    monkeypatch.setattr(signals, "SAME_SIGNAL", 0.0)
    before = signal.signal(second, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))

    def kill_twice() -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.01)
        signal.raise_signal(second)

    try:
        hooks = hooks_with("step", kill_twice, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            train(hooks, steps=12, **SETTINGS)
    finally:
        signal.signal(second, before)
    state = train(hooks, steps=12, **SETTINGS)
    assert state.step == 12
    steps = [json.loads(x)["step"] for x in (state.run_dir / "metrics.jsonl").open()]
    assert steps == sorted(steps)


def test_a_process_that_waits_for_its_cluster_says_so_and_can_be_stopped(tmp_path: Path) -> None:
    from ctl_core.launch import free_ports

    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    program = (  # a shell starts what it runs in the background without SIGINT
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys; from ctl_core import strategy; from ctl_core.config import Config; "
        "from ctl_core.errors import CtlError; strategy.PATIENCE = 0.5\n"
        "try: strategy.prepare(Config(steps=1, run_name='a'))\n"
        "except CtlError as error: sys.exit(f'{error.exit_code} {error}')"
    )
    environ = {**os.environ, "TF_CONFIG": json.dumps(place), "TF_CPP_MIN_LOG_LEVEL": "3"}

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)

    waiting = start()
    assert waiting.stdout is not None
    said = waiting.stdout.readline()
    assert said == f"waiting for the other processes of the cluster: {addresses[1]}\n"
    second = start().communicate()[1]
    assert second == (
        f"75 {addresses[0]}: this process cannot join its cluster: its port is taken, perhaps by "
        "a process of an earlier start.\n"
    )
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(timeout=10) == -signal.SIGINT
