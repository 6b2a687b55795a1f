"""Tests that the graphs of a training are deleted after it, and that what is still used works.

TensorFlow would keep the graph of each ``tf.custom_gradient`` until the process ends. With several
devices, the graphs of every step use one.
"""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import engine, small

ROOT = Path(__file__).parents[2]


@tf.custom_gradient  # type: ignore[untyped-decorator]
def triple_gradient(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns the square of a value, with three times the right gradient."""
    return value * value, lambda gradient: 6.0 * value * gradient


def write_hooks(**others: Any) -> SimpleNamespace:
    """Returns the hooks of a small program whose model uses a custom gradient."""

    def create_model() -> keras.Model:
        return small.model_with(keras.layers.Lambda(triple_gradient))

    names = ("create_dataset", "create_eval_dataset", "create_loss")
    hooks = {name: getattr(small, name) for name in names}
    return SimpleNamespace(**{**hooks, "create_model": create_model, **others})


def differentiate(function: Callable[[tf.Tensor], tf.Tensor]) -> float:
    """Returns the derivative of a function at 2."""
    value = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(value)
        result = function(value)
    return float(tape.gradient(result, value))


@pytest.mark.parametrize("devices", [1, 2])
def test_graphs_are_deleted_after_a_training(devices: int, train: engine.Train) -> None:
    """They are deleted together with the state that the training returns."""
    graphs = []

    def input_pre(batch: Any) -> tf.Tensor:
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return batch[0]

    hooks = write_hooks(input_pre=input_pre)
    train(hooks, steps=4, virtual_devices=devices, eval_every=2)
    gc.collect()
    alive = [graph() for graph in graphs if graph() is not None]
    assert len(graphs) > 3
    assert alive == []


def test_functions_that_a_notebook_keeps_have_their_gradients(train: engine.Train) -> None:
    """A function that was traced by a hook can be differentiated when the training has ended."""
    function = tf.function(triple_gradient, autograph=False)

    def call() -> None:
        function(tf.constant(2.0))

    train(write_hooks(at_step={2: call}), steps=3, virtual_devices=2)
    gc.collect()
    assert differentiate(function) == 12.0
    assert function.experimental_get_tracing_count() == 1


def test_loaded_models_have_their_gradients(train: engine.Train, tmp_path: Path) -> None:
    """A SavedModel that a hook loads can be differentiated when the training has ended."""
    saved: Any = tf.Module()
    specification = tf.TensorSpec([], tf.float32)
    saved.compute = tf.function(triple_gradient, [specification], autograph=False)
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(saved, str(tmp_path / "saved"), options=options)
    loaded = []

    def load() -> None:
        loaded.append(tf.saved_model.load(str(tmp_path / "saved")))

    train(write_hooks(at_step={2: load}), steps=3)
    gc.collect()
    assert differentiate(loaded[0].compute) == 12.0


def test_a_run_has_its_gradients_after_a_hook_has_loaded_another_one(
    train: engine.Train, tmp_path: Path
) -> None:
    """A function that was traced before the other run was loaded can be differentiated after it."""
    function = tf.function(triple_gradient, autograph=False)
    gradients = []

    def call() -> None:
        function(tf.constant(2.0))

    def load_another() -> None:
        ctl_core.load(tmp_path / "runs" / "other", callbacks=write_hooks())
        gc.collect()
        gradients.append(differentiate(function))

    train(write_hooks(), steps=2, run_name="other")
    train(write_hooks(at_step={1: call, 2: load_another}), steps=3)
    assert gradients == [12.0]
    assert function.experimental_get_tracing_count() == 1


MANY_RUNS = """
import tempfile
from tests.engine.test_memory import write_hooks
from tests.golden import engine

engine.start_devices()
folder = tempfile.mkdtemp()
for number in range(10):
    engine.train(write_hooks(), folder, run_name=f"run-{number}", virtual_devices=2, eval_every=8)
    pages = int(open("/proc/self/statm").read().split()[1])
    print("pages", pages)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_many_runs_of_a_notebook_take_the_memory_of_one() -> None:
    """Ten runs on two devices take at most 40 MB more than one run; they took 315 MB more."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_RUNS],
        cwd=ROOT, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("pages ")]
    megabytes = [int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6 for _, pages in lines]
    assert len(megabytes) == 10
    assert max(megabytes) - megabytes[0] < 40
