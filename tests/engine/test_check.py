"""``train --check``: devices are compared, everything is tried once, and nothing stays."""

import fcntl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import engine, small
from tests.golden.catalogue import NAMES, SETTINGS, load_program
from tests.helpers.cases import dropout_model, make_hooks, regression_data, sliced

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


class Worst(keras.metrics.Mean):
    """The largest error: no sum."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(tf.maximum(self.total, tf.reduce_max(tf.abs(y_true - y_pred))))
        self.count.assign(1.0)


class Warm(keras.layers.Layer):
    """Counts the examples that it has seen."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(
            dtype="int64", initializer="zeros", trainable=False, name="seen"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign_add(tf.shape(inputs, tf.int64)[0])
        return inputs * tf.minimum(1.0, tf.cast(self.seen, tf.float32) / 320.0)


class Plateau:
    """Remembers the best loss where no checkpoint does."""

    best = 0.0

    def judge(self, metrics: Any) -> None:
        self.best = metrics["loss"]


def draw(batch: Any, training: bool) -> Any:
    noise = np.random.normal(size=5).astype("float32")
    return batch[0] + noise if training else batch[0]


# Mistakes that train without a word, and how the line begins that names each.
WRONG: dict[str, dict[str, Any]] = {
    r"check: metric_pre .*: the metric worst differs: .* give .*all_gather": {
        "create_metrics": lambda: {"worst": Worst()}
    },
    r"check: create_model .*: the variable .*/seen of the layer .* differs": {
        "create_model": lambda: keras.Sequential([keras.Input((5,)), Warm(), keras.layers.Dense(1)])
    },
    r"check: create_loss \(test_check.py:\d+\): the loss .*differs: it is no sum": {
        "create_loss": lambda: lambda pair: tf.reduce_sum((pair[0] - pair[1][:, 0]) ** 2)
    },
    r"check: update_pre \(test_check.py:\d+\): the update .*/kernel differs": {
        "update_pre": lambda gradients, batch: ([g * len(batch[0]) for g in gradients], [])
    },
    r"input_pre \(test_check.py:\d+\): draws random": {"input_pre": draw},  # each time it is traced
}


@pytest.mark.parametrize("message", small.slow_but(list(WRONG)[-1], of=WRONG))
def test_what_differs_on_three_devices_is_named(check: Check, message: str) -> None:
    with pytest.raises(ctl_core.SetupError, match=f"^{message}"):
        check(hooks(**WRONG[message]))


# For a check they are like others, and take half of the time.
ALIKE = """
    diffusion embedding experts fine_tuning gradient_surgery l2 lora multi_task transformer
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALIKE.split()])
def test_what_trains_rightly_is_well(check: Check, name: str, capsys: Output) -> None:
    program = load_program(name)
    check(program.hooks(), **{**SETTINGS, **program.settings})
    said = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert all("the loss does not depend on" in line for line in said), said


def test_every_hook_runs_once_and_a_run_that_is_there_is_neither_read_nor_locked(
    check: Check, tmp_path: Path, capsys: Output
) -> None:
    """Each hook has what it would have."""
    engine.train(hooks(), tmp_path / "runs", steps=4)
    files = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file())
    before = [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    capsys.readouterr()
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
        after_eval=[lambda metrics, step: ran.append((sorted(metrics), step)), Plateau().judge],
        at_end=lambda reason: ran.append(reason),
    )
    settings = {"virtual_devices": 2, "keep_best": "loss", "ckpt_every": "10min", "warmup": 50}
    with (tmp_path / "runs/run/train.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert check(own, **settings).step == 2
    files = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before
    assert ran == [
        ("third", 3, 16, 20_000, True),
        10,
        ("stop", 10_000),
        ("late", 10_000, 16, 20_000, True),
        (["loss"], 2),
        "done",
    ]
    said = capsys.readouterr().out
    assert said.startswith("check of run: ") and "\ncheck: all well, " in said
    for part in (
        "a step and an evaluation on one and on 3 devices were compared",
        "73 parameters to train",
        ") ran, as after step 10000\n",
        ") ran, as after step 10000; it ends training there. Enough.",
        "  evaluate, predict, export, load: loss ",
    ):
        assert part in said
    (remembered,) = [line for line in said.splitlines() if " remembers " in line]
    assert "after_eval (test_check.py:" in remembered and " remembers best in Python" in remembered
