"""Tests of signals at special moments: the run is saved, and resumes as if it had not stopped."""

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from ctl_core.checkpoint import writer
from ctl_core.checkpoint.record import write_record
from ctl_core.cluster import signals
from ctl_core.session import watch
from tests.golden import engine, small
from tests.helpers.cases import assert_weights, make_hooks
from tests.helpers.project import Train
from tests.helpers.waiting import wait_until, wait_until_or_ended

SETTINGS = {"ckpt_every": 4, "eval_every": 6}
Kill = Callable[[], None]


def hooks_with(during: str, kill: Kill, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns hooks that call ``kill`` once, in the phase that ``during`` names."""
    left = [kill]

    def once(moment: str) -> bool:
        if moment == during and left:
            left.pop()()
        return True

    def save_once(folder: Path, record: Any) -> None:
        once("saving")
        write_record(folder, record)

    examples = tf.data.Dataset.from_tensor_slices(small.data())
    monkeypatch.setattr(writer, "write_record", save_once)
    return make_hooks(
        create_dataset=lambda: examples.shuffle(40, seed=3).batch(16),
        create_model=lambda: once("creation") and small.create_model(),
        input_pre=lambda batch: once("tracing") and batch[0],
        create_eval_dataset=small.create_eval_dataset,
        after_eval=lambda step: step and once("evaluation"),
        every_steps={1: lambda step, loss: step == 5 and once("step")},
    )


@pytest.mark.slow
def test_a_signal_at_any_moment_saves_and_the_run_goes_on(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: dict[str, tuple[int, signal.Signals]] = {
        "creation": (0, signal.SIGTERM),
        "tracing": (0, signal.SIGINT),
        "saving": (5, signal.SIGTERM),  # The run stops at the next step after saving step 4.
        "evaluation": (6, signal.SIGINT),
    }
    whole = train(hooks_with("", lambda: None, monkeypatch), steps=12, run_name="whole", **SETTINGS)
    for during, (stops_at, number) in moments.items():

        def kill_twice(number: int = number) -> None:
            """Raises a signal twice, like a process manager that signals all processes."""
            signal.raise_signal(number)
            signal.raise_signal(number)

        hooks = hooks_with(during, kill_twice, monkeypatch)
        stopped = train(hooks, steps=12, run_name=during, **SETTINGS)
        assert (stopped.step, stopped.stopped_by) == (stops_at, number)
        resumed = train(hooks, steps=12, run_name=during, **SETTINGS)
        assert resumed.step == 12
        assert resumed.stopped_by is None
        assert_weights(resumed, whole, rtol=0)
        metrics, expected = (state.run_dir / "metrics.jsonl" for state in (resumed, whole))
        assert metrics.read_text() == expected.read_text()


def test_a_later_second_sigint_leaves_an_endless_loop_in_a_hook(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a second SIGINT, the log reports an interruption instead of a failure."""
    monkeypatch.setattr(signals, "SAME_SIGNAL", 0.0)

    def endless() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            signal.raise_signal(number)
            time.sleep(0.05)
        while True:
            time.sleep(600)

    hooks = hooks_with("step", endless, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(hooks, steps=12, **SETTINGS)
    log = (tmp_path / "runs/run/train.log").read_text()
    assert log.count("ERROR interrupted") == 1
    assert "Traceback" not in log
    state = train(hooks, steps=12, **SETTINGS)
    assert state.step == 12
    steps = [json.loads(x)["step"] for x in (state.run_dir / "metrics.jsonl").open()]
    assert steps == sorted(steps)


@pytest.fixture(params=[signal.SIGUSR1, signal.SIGHUP], ids=lambda number: number.name)
def like_sigterm(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that has its default effect during the test."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_other_signals_count_as_sigterm(
    train: Train, monkeypatch: pytest.MonkeyPatch, like_sigterm: signal.Signals
) -> None:
    """Batch systems send SIGUSR1 before a time limit, and the end of a terminal sends SIGHUP.

    https://github.com/hiyouga/LlamaFactory/issues/3036
    """
    kill = functools.partial(signal.raise_signal, like_sigterm)
    state = train(hooks_with("step", kill, monkeypatch), steps=12, **SETTINGS)
    assert (state.step, state.stopped_by) == (5, signal.SIGTERM)
    assert signal.getsignal(like_sigterm) is signal.SIG_DFL


def test_a_signal_that_the_user_ignores_does_not_stop_a_run(like_sigterm: signal.Signals) -> None:
    """A program that nohup starts ignores SIGHUP."""
    signal.signal(like_sigterm, signal.SIG_IGN)
    with signals.Signals() as received:
        signal.raise_signal(like_sigterm)
        assert received.numbers == []
    assert signal.getsignal(like_sigterm) is signal.SIG_IGN


def test_a_process_that_is_forked_off_a_run_ends_by_a_signal() -> None:
    """SIGTERM, which ``multiprocessing`` sends, ends a forked process while the run continues."""
    forking = multiprocessing.get_context("fork")
    started = forking.Event()

    def sleep() -> None:
        started.set()  # Python drops signals that arrive during a fork.
        time.sleep(600)

    with signals.Signals() as received:
        child = forking.Process(target=sleep)
        child.start()
        assert started.wait(60)
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM
        assert not received.numbers


# A module that every command imports at its beginning, and hooks.
SLEEPING = """
import time

print("there", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "during", "code", "said"),
    [
        (signal.SIGINT, "pydantic.py", 130, "error: interrupted"),
        (signal.SIGTERM, "pydantic.py", 143, "error: SIGTERM: the process ends"),
        (signal.SIGUSR1, "callbacks.py", 143, "error: SIGUSR1: the process ends"),
    ],
)
def test_a_signal_during_the_start_ends_the_process(
    tmp_path: Path, number: int, during: str, code: int, said: str
) -> None:
    """The end has one line and the documented code, before and after the imports."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    (tmp_path / during).write_text(SLEEPING)
    environ = engine.environment()
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environ["PYTHONPATH"]])
    command = engine.command_line("train", "--steps=4", "--run-name=a")
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("\n")) == (code, 1)
    assert err.startswith(said)


@pytest.mark.cluster
def test_a_signal_before_training_ends_a_cluster(tmp_path: Path) -> None:
    """TensorFlow's own handler, which a process gets when it joins, would ignore SIGTERM."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + SLEEPING)
    command = engine.command_line("train", "--steps=4", "--run-name=a", "--workers=2")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=engine.environment(), stdout=log, stderr=log
        )
    others_log = tmp_path / "runs/a/worker-1.log"
    try:
        wait_until_or_ended(
            lambda: "there" in (tmp_path / "log").read_text() and "there" in others_log.read_text(),
            process,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
    assert "error: SIGTERM: the process ends; it was not training." in others_log.read_text()
    assert not (tmp_path / "runs/a/ckpt").exists()


def test_a_hanging_hook_does_not_cut_a_checkpoint_in_the_background(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit after SIGTERM ends the process only after the checkpoint is complete."""
    hanging = threading.Event()
    written: list[int] = []
    ended: list[list[int]] = []

    def write_slowly(folder: Path, record: Any) -> None:
        if record.step == 4:
            assert hanging.wait(60)
            time.sleep(3.0)
        write_record(folder, record)
        written.append(record.step)

    def hang(step: int) -> None:
        if step == 5:
            hanging.set()
            signal.raise_signal(signal.SIGTERM)
            wait_until(lambda: ended, 60.0)

    monkeypatch.setattr(writer, "write_record", write_slowly)
    monkeypatch.setattr(watch.Watch, "_end_process", lambda *_: ended.append(list(written)))
    train(make_hooks(every_steps={1: hang}), steps=8, ckpt_every=2, stall_seconds=1)
    assert ended[0] == [2, 4]
