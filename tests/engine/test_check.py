"""``train --check``: everything is tried once, what is wrong is said, and nothing stays."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.__main__ import main
from tests.helpers.cases import assert_weights, dropout_model, make_hooks, regression_data, sliced
from tests.helpers.project import EVALUATED

Check = Callable[..., ctl_core.State]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Returns ``check(hooks, **settings)``; afterwards, no temporary folder may be left."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def run(hooks: Any, **settings: Any) -> ctl_core.State:
        own = {"steps": 20_000, "batch_size": 16, "run_name": "run"}
        own["runs_dir"] = str(tmp_path / "runs")
        try:
            return ctl_core.check(hooks, ctl_core.Config(**{**own, **settings}))
        finally:
            assert list(temporary.glob("ctl_core-check-*")) == []

    return run


def hooks(**more: Any) -> Any:
    inputs, target = regression_data()
    own = {"create_eval_dataset": sliced((inputs[:64], target[:64]))}
    return make_hooks(**{**own, "create_model": dropout_model, **more})


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_hook_runs_once_with_what_it_would_have(
    check: Check, tmp_path: Path, replicas: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []

    def note(name: str) -> Any:
        def late(step: int, batch: Any, config: Any, chief: bool, manager: Any) -> None:
            ran.append((name, step, batch[0].shape[0], config.steps, chief))
            assert manager.latest_checkpoint  # one is there to be restored, as there would be

        return late

    def stop(step: int) -> None:
        ran.append(("stop", step))
        raise ctl_core.StopTraining("Enough.")

    examples: list[int] = []

    def eval_pre(loss: Any) -> Any:
        return tf.reduce_sum(loss), tf.py_function(count(examples), [loss], "float32")

    own = hooks(
        every_steps={3: note("third"), 10: [ctl_core.deferred(lambda step: ran.append(step))]},
        at_step={10_000: [stop, note("late")]},
        after_eval=lambda metrics, step: ran.append((sorted(metrics), step)),
        at_end=lambda reason: ran.append(reason),
        eval_pre=eval_pre,
    )
    state = check(own, virtual_devices=replicas, keep_best="loss", ckpt_every="10min", warmup=50)
    assert ran == [
        ("third", 3, 16, 20_000, True),
        10,
        ("stop", 10_000),
        ("late", 10_000, 16, 20_000, True),
        (["loss"], 2),
        "done",
    ]
    assert sum(examples) == 16  # a global batch
    assert state.step == 2 and not (tmp_path / "runs").exists()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("check of run: ")
    assert said[-1].startswith("check: all well, ") and said[-1].endswith(" s")
    found = "".join(f"{line}\n" for line in said)
    for part in (
        "  create_dataset (cases.py:",
        f"batches of (float32[{16 // replicas}, 5], float32[{16 // replicas}, 1])",
        "89 parameters, 73 of them trainable",
        "  at_step[10000] (test_check.py:",
        "late ran, as after step 10000",
        "stop ran, as after step 10000; it ends training there. Enough.",
        "  evaluation: loss ",
        "  checkpoint: written and read back, ",
        f"  predictions: output [{16 // replicas}, 1]",
    ):
        assert part in found


def count(examples: list[int]) -> Any:
    def number(loss: Any) -> float:
        examples.append(loss.shape[0])
        return 0.0

    return number


def test_a_run_that_is_there_is_neither_read_nor_locked(check: Check, tmp_path: Path) -> None:
    config = ctl_core.Config(
        steps=4, batch_size=16, run_name="run", runs_dir=str(tmp_path / "runs")
    )
    ctl_core.train(hooks(), config)
    files = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file())
    before = [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    with (tmp_path / "runs/run/train.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert check(hooks()).step == 2
    files = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before


def test_it_is_an_option_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "callbacks.py").write_text(EVALUATED + "\n\nat_step = {10000: lambda: None}\n")
    (tmp_path / "config.yaml").write_text("epochs: 60\nbatch_size: 16\n")
    monkeypatch.chdir(tmp_path)
    there = sorted(os.listdir(tmp_path))
    assert main(["train", "--check"]) == 0
    assert "check: all well" in capsys.readouterr().out
    (tmp_path / "callbacks.py").write_text(EVALUATED + "\n\nat_step = {10000: lambda: x}\n")
    assert main(["train", "--check"]) == 1
    assert capsys.readouterr().err.startswith("error: at_step[10000] (callbacks.py:")
    assert sorted(os.listdir(tmp_path)) == there


def test_a_signal_ends_it(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ends: list[str] = []

    def hook() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    state = check(hooks(every_steps={5: hook}, at_end=lambda reason: ends.append(reason)))
    assert (state.stopped_by, ends) == (signal.SIGTERM, [])
    said = capsys.readouterr().out
    assert "SIGTERM: the check stops after what is running now." in said
    assert said.endswith("check: stopped by SIGTERM; so far, all is well.\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_weights_are_what_two_steps_make_of_them(check: Check, tmp_path: Path) -> None:
    """Whatever is tried in between changes nothing of what it tries later."""
    config = ctl_core.Config(
        steps=2, batch_size=16, run_name="two", runs_dir=str(tmp_path / "runs")
    )
    two = ctl_core.train(hooks(), config)
    state = check(hooks(every_steps={7: lambda loss: None}))
    assert_weights(state, two, rtol=1e-5)


class Spread(keras.layers.Layer):
    """Adds how much the means of a batch's columns differ, with those of all replicas if asked."""

    def __init__(self, exchange: Callable[[Any], Any]) -> None:
        super().__init__()
        self.exchange = exchange

    def call(self, inputs: Any) -> Any:
        self.add_loss(tf.math.reduce_std(self.exchange(tf.reduce_mean(inputs, axis=0))))
        return inputs


def of_pairs(exchange: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a loss of each example with the mean of all outputs of the batch."""

    def loss(loss_input: Any) -> Any:
        output = loss_input[0][:, 0]
        return tf.abs(output - exchange(tf.reduce_mean(output)))

    return loss


def mean_of_all(value: Any) -> Any:
    return ctl_core.all_reduce(value, "mean")


def mean_by_strategy(value: Any) -> Any:
    replica = tf.distribute.get_replica_context()
    return replica.all_reduce(tf.distribute.ReduceOp.MEAN, value) if replica else value


@pytest.mark.parametrize("exchange", [None, mean_of_all, mean_by_strategy])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_of_the_batch_as_a_whole_is_said(
    check: Check,
    capsys: pytest.CaptureFixture[str],
    replicas: int,
    exchange: Callable[[Any], Any] | None,
) -> None:
    """As dropout_model's has no such loss, the other tests' checks have no warning."""
    mean: Callable[[Any], Any] = exchange or (lambda value: value)

    def create_model() -> keras.Model:
        return keras.Sequential([keras.Input((5,)), Spread(mean), keras.layers.Dense(1)])

    check(
        hooks(create_model=create_model, create_loss=lambda: of_pairs(mean)),
        virtual_devices=replicas,
    )
    warned = [line for line in capsys.readouterr().out.splitlines() if "as a whole" in line]
    if exchange is not None:
        assert not warned
        return
    names = [line.removeprefix("warning: ").split(" (")[0] for line in warned]
    assert names == ["create_loss", "create_model"]
    assert "in the mean of both" in warned[0] and "what is added to the loss is" in warned[1]
