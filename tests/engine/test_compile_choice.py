"""--jit-compile auto: chosen before the first step and kept; nothing is trained by it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml
from tensorflow.python.framework import config

from ctl_core import compile_choice
from tests.helpers.cases import make_hooks, sliced
from tests.helpers.fixtures import Train
from tests.helpers.readers import Batches, Loader
from tests.helpers.resume import values
from tests.helpers.stretched import IMAGES, TARGET, image_hooks, words_hooks

pytestmark = pytest.mark.slow


def said(capfd: pytest.CaptureFixture[str]) -> str:
    (line,) = (x for x in capfd.readouterr().out.splitlines() if "jit_compile auto" in x)
    return line


def kept(state: Any) -> Any:
    return yaml.safe_load((state.run_dir / "config.yaml").read_text())["jit_compile"]


def told_times(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    """Has both ways train some steps, and says which took longer: plain graphs if ``faster``."""
    times = iter((2e-3, 1e-3) if faster else (1e-3, 2e-3))

    def timed(functions: Any) -> float:
        functions.train_steps(30)
        return next(times)

    monkeypatch.setattr(compile_choice, "_seconds_per_step", timed)


@pytest.mark.parametrize(("faster", "saved"), [(True, True), (True, False), (False, True)])
def test_what_is_tried_trains_nothing(
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    faster: bool,
    saved: bool,
) -> None:
    """Also where the position in the data cannot be saved, so that they are made anew."""
    told_times(monkeypatch, faster)

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        data = sliced((IMAGES, TARGET))(per_replica_batch_size).shuffle(5, seed=1)
        if saved:
            return data

        def batches() -> Iterator[Any]:
            yield from data.as_numpy_iterator()

        return tf.data.Dataset.from_generator(batches, output_signature=data.element_spec)

    def run(name: str, jit_compile: Any) -> Any:
        hooks = image_hooks(create_dataset=create_dataset, every_steps={4: lambda loss: None})
        hooks.create_train_metrics = lambda: {"mean": keras.metrics.Mean()}
        hooks.train_metric_pre = lambda loss: loss
        return train(hooks, steps=10, batch_size=4, run_name=name, jit_compile=jit_compile)

    chosen = run("auto", "auto")
    line = said(capfd)
    assert ("compiled stretches, " if faster else "plain graphs, compiled ") in line
    assert kept(chosen) is chosen.config.jit_compile is faster
    assert (chosen.context.stack is not None) is faster
    assert chosen.functions.trace_counts() == [1, 1]
    other = run("told", faster)
    found, expected = values(chosen), values(other)
    for path, value in expected.items():
        np.testing.assert_array_equal(value, found[path], err_msg=path)
    assert chosen.progress.examples == other.progress.examples == 40


READERS: dict[str, Callable[[int], Any]] = {
    "PyDataset": Batches,
    "with a state": Loader,
    "generator": lambda batch_size: iter(list(Loader(batch_size))),
}


@pytest.mark.parametrize(
    ("kind", "faster"), [("PyDataset", True), ("with a state", False), ("generator", True)]
)
def test_a_reader_begins_at_its_first_element_after_it(
    train: Train, monkeypatch: pytest.MonkeyPatch, kind: str, faster: bool
) -> None:
    """The steps that are timed read over the end of a pass."""
    told_times(monkeypatch, faster)

    def create_dataset(global_batch_size: int) -> Any:
        return READERS[kind](global_batch_size)

    def weights(name: str, jit_compile: Any) -> list[Any]:
        hooks = make_hooks(create_dataset=create_dataset)
        state = train(hooks, steps=15, run_name=name, jit_compile=jit_compile)
        assert state.config.jit_compile is faster
        return [weight.numpy() for weight in state.train_model.weights]

    for one, other in zip(weights("auto", "auto"), weights("told", faster), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_clock_decides_and_a_resumed_run_goes_on_with_it(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_choice, "_LONG", 0.01)
    first = train(words_hooks(), steps=5, batch_size=8, jit_compile="auto")
    assert "µs a step" in said(capfd)
    monkeypatch.setattr(compile_choice, "_seconds_per_step", None)  # nobody asks the clock again
    again = train(words_hooks(), steps=9, batch_size=8, jit_compile="auto")
    assert "as the run was trained before" in said(capfd)
    assert kept(again) is first.config.jit_compile is again.config.jit_compile


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Takes op determinism back after a test, for which TensorFlow has no public way."""
    yield
    config.disable_op_determinism()


@pytest.mark.usefixtures("deterministic")
def test_with_determinism_a_rule_decides(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_choice, "_seconds_per_step", None)
    settings = {"batch_size": 8, "jit_compile": "auto", "deterministic": True}
    state = train(words_hooks(), steps=3, **settings)
    assert "compiled stretches, with deterministic" in said(capfd)
    assert kept(state) is True


def convolving() -> keras.Model:
    layers = [keras.layers.Conv2D(2, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6, 6, 1)), *layers])


def strings(gradients: Any) -> Any:
    tf.print(gradients[0])
    return gradients, gradients


PLAIN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "convolutions": (
        {"create_model": convolving, "create_dataset": sliced((IMAGES, TARGET))},
        {},
        "plain graphs, since Conv2D is slow in an executable on a CPU",
    ),
    "replicas": ({}, {"virtual_devices": 2}, "plain graphs, since gradients are summed over 2"),
    "unknown ops": ({"update_pre": strings}, {}, "plain graphs, since XLA cannot compile String"),
    "summaries": (
        {"input_pre": lambda batch: (tf.summary.scalar("a", 1.0), batch[0])[1]},
        {},
        "plain graphs, since ",
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_where_plain_graphs_stay(
    train: Train, capfd: pytest.CaptureFixture[str], name: str, tmp_path: Path
) -> None:
    hooks, settings, why = PLAIN[name]
    state = train(words_hooks(**hooks), steps=3, batch_size=4, jit_compile="auto", **settings)
    assert re.search(why, said(capfd))
    assert kept(state) is False
    if name == "summaries":  # those of steps that were tried are not written
        (file,) = (tmp_path / "runs/run/tb/train").glob("*")
        events = tf.compat.v1.train.summary_iterator(str(file))
        steps = [e.step for e in events for v in e.summary.value if v.tag == "a"]
        assert steps == [1, 2, 3]
