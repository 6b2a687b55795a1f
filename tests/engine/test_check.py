"""``train --check``: devices are compared, everything is tried once, and nothing stays."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.__main__ import main
from tests.golden.catalogue import NAMES, SETTINGS, load_program
from tests.helpers.cases import dropout_model, make_hooks, regression_data, sliced
from tests.helpers.project import EVALUATED

Check = Callable[..., ctl_core.State]
Output = pytest.CaptureFixture[str]


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
    return make_hooks(**{**own, **more})


class Counting(keras.layers.Layer):
    """Counts its examples, as for a warm-up."""

    def build(self, shape: Any) -> None:
        options = {"dtype": "int64", "initializer": "zeros", "trainable": False}
        self.seen = self.add_weight(shape=(), name="seen", **options)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign_add(tf.shape(inputs, out_type=tf.int64)[0])
        return inputs


class Worst(keras.metrics.Metric):
    """The largest error: no sum."""

    def __init__(self) -> None:
        super().__init__(name="worst")
        self.worst = self.add_weight(shape=(), initializer="zeros", name="worst")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.worst.assign(tf.maximum(self.worst, tf.reduce_max(tf.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.worst


def with_layer(layer: Callable[[], keras.layers.Layer]) -> Callable[[], keras.Model]:
    return lambda: keras.Sequential([keras.Input((5,)), layer(), keras.layers.Dense(1)])


def sum_of_pairs(pair: Any) -> Any:
    return tf.reduce_sum((pair[0] - pair[1][:, 0]) ** 2)


# Mistakes that train without a word, and how the line begins that names each.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a counter": (
        {"create_model": with_layer(Counting)},
        r"create_model \(test_check.py:\d+\): the variable \S*counting/seen of the layer "
        r"'counting' \(Counting\) differs: .*all_reduce.* \[one device 30, three 10\]",
    ),
    "a metric of maxima": (
        {"create_metrics": lambda: {"worst": Worst()}},
        r"metric_pre .*: the metric worst differs: .* give .*all_gather",
    ),
    "a sum over pairs": (
        {"create_loss": lambda: sum_of_pairs},
        r"create_loss \(test_check.py:\d+\): the loss .*differs: it is no sum",
    ),
    "an update by replicas": (
        {"update_pre": lambda gradients, batch: ([g * len(batch[0]) for g in gradients], [])},
        r"update_pre \(test_check.py:\d+\): the update .*/kernel differs",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_differs_on_three_devices_is_named(check: Check, name: str) -> None:
    more, message = WRONG[name]
    with pytest.raises(ctl_core.SetupError, match=rf"^check: {message}"):
        check(hooks(**more))


def test_numbers_that_are_drawn_while_tracing_are_refused(check: Check) -> None:
    def input_pre(batch: Any, training: bool) -> Any:
        noise = np.random.normal(size=5).astype("float32")
        return batch[0] + noise if training else batch[0]

    with pytest.raises(ctl_core.SetupError, match=r"^input_pre \(test_check.py:\d+\): has other"):
        check(hooks(input_pre=input_pre))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_trains_rightly_is_well(check: Check, name: str, capsys: Output) -> None:
    program = load_program(name)
    check(program.hooks(), **{**SETTINGS, **program.settings})
    said = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert all("the loss does not depend on" in line for line in said), said


def test_an_object_that_no_export_can_hold_is_named(check: Check) -> None:
    numbers = iter(tf.data.Dataset.range(10**6))

    def serve(inputs: Any) -> Any:
        return inputs[0] + 0.0 * tf.cast(next(numbers), tf.float32)

    serve.input_signature = [(tf.TensorSpec([None, 5]),)]  # type: ignore[attr-defined]
    with pytest.raises(ctl_core.SetupError, match="cannot be saved: "):
        check(hooks(serve=serve))


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_hook_runs_once_with_what_it_would_have(
    check: Check, tmp_path: Path, replicas: int, capsys: Output
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

    own = hooks(
        create_model=dropout_model,
        every_steps={3: note("third"), 10: [ctl_core.deferred(lambda step: ran.append(step))]},
        at_step={10_000: [stop, note("late")]},
        after_eval=lambda metrics, step: ran.append((sorted(metrics), step)),
        at_end=lambda reason: ran.append(reason),
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
    assert state.step == 2 and not (tmp_path / "runs").exists()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("check of run: ")
    assert said[-1].startswith("check: all well, ") and said[-1].endswith(" s")
    found = "".join(f"{line}\n" for line in said)
    for part in (
        "  devices: a step and an evaluation on one and on 3 were compared",
        "73 parameters to train",
        "late ran, as after step 10000",
        "stop ran, as after step 10000; it ends training there. Enough.",
        "  evaluate: loss ",
        "  predict, export, load: the model gives output",
    ):
        assert part in found


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    (tmp_path / "callbacks.py").write_text(EVALUATED + "\n\nat_step = {10000: lambda: None}\n")
    (tmp_path / "config.yaml").write_text("epochs: 60\nbatch_size: 16\n")
    monkeypatch.chdir(tmp_path)
    there = sorted(os.listdir(tmp_path))
    assert main(["train", "--check"]) == 0
    assert re.search(r"check: all well, [\d.]+ s\n$", capsys.readouterr().out)
    (tmp_path / "callbacks.py").write_text(EVALUATED + "\n\nat_step = {10000: lambda: x}\n")
    assert main(["train", "--check"]) == 1
    assert capsys.readouterr().err.startswith("error: at_step[10000] (callbacks.py:")
    assert sorted(os.listdir(tmp_path)) == there


def test_a_signal_ends_it(check: Check, capsys: Output) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ends: list[str] = []

    def hook() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    state = check(hooks(every_steps={5: hook}, at_end=lambda reason: ends.append(reason)))
    assert (state.stopped_by, ends) == (signal.SIGTERM, ["done"])
    said = capsys.readouterr().out
    assert said.endswith("check: stopped by SIGTERM; so far, all is well.\n")
    assert signal.getsignal(signal.SIGTERM) is before
