"""Tests that a hanging run reports the location in the code, and can be ended by signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.golden import small
from tests.helpers import lean
from tests.helpers.cases import make_hooks
from tests.helpers.project import Train
from tests.helpers.waiting import wait_until

NOTICE = " s (no step, evaluation batch or checkpoint); this process is "


def read_notices(folder: Path) -> list[str]:
    log = (folder / "runs/run/train.log").read_text()
    return [line for line in log.splitlines() if NOTICE in line]


def pause() -> bool:
    time.sleep(2.0)
    return True


def test_a_hook_that_takes_long_is_named_once(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow hook is reported once. A later call is reported only if it takes twice as long."""
    hooks = make_hooks(every_steps={1: lambda step: step > 3 and pause()})
    train(hooks, steps=5, stall_seconds=1)
    (notice,) = read_notices(tmp_path)
    assert f"step 4: nothing has ended for 1{NOTICE}in every_steps[1] (test_watch.py:" in notice
    assert capsys.readouterr().out.count(NOTICE) == 1


def test_a_graph_call_that_waits_for_data_is_reported_with_the_line_that_it_waits_for(
    train: Train, tmp_path: Path
) -> None:
    def generate() -> Iterator[Any]:
        inputs, target = small.data()
        for number in range(40):
            if number == 30:
                pause()
            yield inputs[:16], target[:16]

    def create_dataset() -> tf.data.Dataset:
        spec = (tf.TensorSpec([16, small.FEATURES]), tf.TensorSpec([16, 1]))
        return tf.data.Dataset.from_generator(generate, output_signature=spec)

    train(make_hooks(create_dataset=create_dataset), steps=36, batch_size=16, stall_seconds=1)
    (notice,) = read_notices(tmp_path)
    assert f"{NOTICE}in a graph call, which computes or waits for data; other threads are" in notice
    assert "test_watch.py:" in notice.partition("other threads")[2]


@pytest.mark.parametrize("stall_seconds", [0, 1])
def test_tracing_is_not_reported_nor_anything_without_a_limit(
    train: Train, tmp_path: Path, stall_seconds: int
) -> None:
    def input_pre(batch: Any) -> Any:
        pause()  # The hook is called while the step is traced.
        return batch[0]

    hooks = make_hooks(input_pre=input_pre, every_steps={1: lambda: stall_seconds or pause()})
    train(hooks, steps=1, stall_seconds=stall_seconds)
    assert read_notices(tmp_path) == []


# ---- Processes ---------------------------------------------------------------------------------

STUCK = (
    small.CALLBACKS
    + """
import json
import os
import threading
import time

from ctl_core.data import with_seeds

task = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 1}}'))["task"]["index"]


def wait_for_ever(number):
    print("waits", flush=True)
    while True:
        time.sleep(1)


def create_dataset(global_batch_size):
    examples = tf.data.Dataset.from_tensor_slices(small.data()).batch(global_batch_size).repeat()
    if os.environ.get("STUCK") != "data":
        return examples
    nothing = tf.data.Dataset.range(1).map(
        lambda number: tf.py_function(wait_for_ever, [number], tf.int64)
    )
    return examples.take(9).concatenate(nothing.flat_map(lambda _: examples))


def get_stuck(step):
    if os.environ.get("STUCK") == "hook" and task == 1 and step == 5:
        wait_for_ever(step)


every_steps = {1: get_stuck}
"""
)


def start(folder: Path, stuck: str, *flags: str) -> subprocess.Popen[str]:
    (folder / "callbacks.py").write_text(STUCK)
    words = ["--run-name=run", "--steps=12", "--ckpt-every=2", "--batch-size=16", *flags]
    environ = {**os.environ, "STUCK": stuck, "PYTHONPATH": lean.PYTHONPATH}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ctl_core", "train", *words],
            cwd=folder,
            env=environ,
            stdout=log,
            stderr=log,
            text=True,
        )


def wait_for(folder: Path, words: str) -> None:
    log = folder / "log"
    wait_until(lambda: words in log.read_text(), seconds=120, explain=log.read_text)


@pytest.mark.slow
def test_signals_end_a_process_whose_graph_call_blocks(tmp_path: Path) -> None:
    """A signal ends a process with a blocked graph call, and the run resumes from a checkpoint."""
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        (tmp_path / "log").unlink(missing_ok=True)
        process = start(tmp_path, "data", "--stall-seconds=3")
        wait_for(tmp_path, "waits")  # data are read ahead, so training may not have begun
        wait_for(tmp_path, NOTICE)
        process.send_signal(number)
        wait_for(
            tmp_path,
            f"{number.name}: the run stops and is saved as soon as the current steps have ended",
        )
        if number == signal.SIGINT:
            time.sleep(1.5)
            process.send_signal(number)
        assert process.wait(60) == code
        assert not (tmp_path / "runs/run/pid").exists()
    log = (tmp_path / "log").read_text()
    assert "If that takes longer than 3 s, the run ends without saving." in log
    assert "error: SIGTERM: nothing ended within 3 s; this process was in a graph call" in log
    assert start(tmp_path, "").wait(120) == 0
    assert "resuming at step 8" in (tmp_path / "log").read_text()


@pytest.mark.cluster
def test_a_cluster_says_which_process_is_stuck_and_where(tmp_path: Path) -> None:
    process = start(tmp_path, "hook", "--stall-seconds=5", "--workers=2")
    wait_for(tmp_path, NOTICE)
    log = (tmp_path / "log").read_text()
    assert (
        f"step 5: nothing has ended for 5{NOTICE}waiting for the other processes; process 1 at 127"
        in log
    )
    assert "is in every_steps[1] (callbacks.py:" in log
    process.terminate()
    assert process.wait(60) == 143
    log = (tmp_path / "log").read_text()
    assert "If that takes longer than 5 s, the run ends without saving." in log
