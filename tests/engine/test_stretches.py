"""With --jit-compile, many steps in one executable: the same weights, wherever it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from ctl_core.graph import StepFunctions
from tests.golden.programs import multi_task, wgan_gp
from tests.helpers.cases import dropout_model, make_hooks, nadam, set_weights
from tests.helpers.fixtures import Train
from tests.helpers.stretched import RANDOM, TARGET, words_hooks

pytestmark = pytest.mark.slow

BATCH, STEPS = 8, 12


def adagrad(lr: Any) -> keras.Optimizer:
    """Squares each row of a sparse gradient: a row in two parts would be another step."""
    return keras.optimizers.Adagrad(lr, 0.1, epsilon=1e-3)


PROGRAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (words_hooks, {}),
    "adagrad": (lambda: words_hooks(create_opt=adagrad), {}),
    "micro-batches": (words_hooks, {"accumulate_steps": 2}),
    "schedule": (words_hooks, {"lr_schedule": "cosine", "warmup": 3, "ema": 0.9}),
    "two objectives": (multi_task.hooks, {}),
    "turns": (wgan_gp.hooks, {}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_weights_are_those_of_plain_graphs(train: Train, name: str) -> None:
    make, settings = PROGRAMS[name]
    settings = {"steps": STEPS, "batch_size": BATCH, "learning_rate": 0.05, **settings}
    plain = train(make(), run_name="plain", **settings)
    compiled = train(make(), run_name="compiled", jit_compile=True, **settings)
    assert compiled.functions.trace_counts() == plain.functions.trace_counts()
    for ours, other in zip(compiled.train_model.weights, plain.train_model.weights, strict=True):
        bound = 1e-5 * max(1.0, float(np.abs(other.numpy()).max()))
        np.testing.assert_allclose(ours.numpy(), other.numpy(), 1e-4, bound, err_msg=ours.path)


@pytest.mark.parametrize("name", ["micro-batches", "two objectives", "turns"])
def test_a_loss_that_a_hook_reads_comes_out_of_the_loop(
    train: Train, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, settings = PROGRAMS[name]
    settings = {"steps": STEPS, "batch_size": BATCH, "learning_rate": 0.05, **settings}
    losses: dict[bool, list[Any]] = {False: [], True: []}
    calls: list[int] = []
    take = StepFunctions.train_step

    def counted(self: Any, fetches: Any, steps: int = 1) -> Any:
        calls.append(steps)
        return take(self, fetches, steps)

    for jit in losses:
        own = make()
        own.every_steps = {4: lambda loss, jit=jit: losses[jit].append(loss)}
        monkeypatch.setattr(StepFunctions, "train_step", counted if jit else take)
        train(own, run_name=str(jit), jit_compile=jit, **settings)
    assert len(calls) == 3 and calls[0] == 4  # then a clock says how many are taken at once
    for read, expected in zip(losses[True], losses[False], strict=True):
        tf.nest.assert_same_structure(read, expected)
        np.testing.assert_allclose(tf.nest.flatten(read), tf.nest.flatten(expected), 1e-4)


def test_float16_skips_what_is_not_finite(train: Train) -> None:
    def grad_pre(loss: Any, train_model: Any, step: Any) -> Any:
        return tf.where(step == 3, np.inf, 1.0) * loss, 0.0, train_model.trainable_variables

    own = words_hooks(grad_pre=grad_pre)
    settings = {"steps": 8, "batch_size": BATCH, "precision": "float16", "on_nan": "warn"}
    states = [train(own, run_name=str(jit), jit_compile=jit, **settings) for jit in (False, True)]
    plain, compiled = states
    assert int(compiled.optimizer.iterations) == int(plain.optimizer.iterations)
    assert compiled.progress.noted == plain.progress.noted
    assert compiled.progress.noted.steps == compiled.progress.noted.first - 2 == 1
    for ours, other in zip(compiled.train_model.weights, plain.train_model.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), other.numpy(), 2e-2, 2e-3)


def freeze(train_model: Any) -> None:
    train_model.layers[0].trainable = not train_model.layers[0].trainable


CUTS: dict[str, tuple[dict[int, Any], dict[str, Any], tuple[int, ...]]] = {
    "resumed": ({}, {"ckpt_every": 4}, (3, 4, 11, 20)),
    "its loss is read": ({3: lambda loss: None}, {"ckpt_every": 5}, (5, 7, 20)),
    "observed": ({3: lambda loss, output: None, 7: lambda gradients: None}, {}, (20,)),
    "each observed": ({1: lambda loss: None}, {}, (9, 20)),
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Takes op determinism back after a test, for which TensorFlow has no public way."""
    yield
    config.disable_op_determinism()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", CUTS)
def test_where_it_is_cut_changes_no_bit(train: Train, name: str) -> None:
    """With Dropout, batch normalisation and Nadam; a layer is frozen and unfrozen on the way."""
    every, settings, stops = CUTS[name]
    own = {"create_model": dropout_model, "create_opt": nadam, "at_step": {6: freeze, 13: freeze}}
    settings = {"batch_size": BATCH, "jit_compile": True, "deterministic": True} | settings
    whole = train(make_hooks(**own), steps=20, run_name="whole", **settings)
    settings = {**settings, "run_name": "cut"}
    for stop in stops:
        cut = train(make_hooks(**own, every_steps=every), steps=stop, **settings)
    variables = zip(cut.recording.variables.items(), whole.recording.variables.items(), strict=True)
    for (name, found), (_, expected) in variables:
        np.testing.assert_array_equal(found.numpy(), expected.numpy(), err_msg=name)


def test_what_differs_in_shape_is_compiled_step_by_step(train: Train) -> None:
    lengths = RANDOM.integers(2, 6, 40)

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        rows = tf.RaggedTensor.from_row_lengths(
            RANDOM.normal(size=lengths.sum()).astype("float32"), lengths
        )
        data = tf.data.Dataset.from_tensor_slices((rows, TARGET[:40]))
        return data.map(lambda row, y: (row, y)).padded_batch(per_replica_batch_size)

    def hooks() -> SimpleNamespace:
        return words_hooks(
            create_dataset=create_dataset,
            create_model=lambda: set_weights(
                keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            ),
            input_pre=lambda batch: tf.reduce_sum(batch[0], 1, keepdims=True),
        )

    states = []
    for jit in (False, True):
        RANDOM.bit_generator.state = np.random.default_rng(9).bit_generator.state
        lengths = RANDOM.integers(2, 6, 40)
        states.append(train(hooks(), run_name=str(jit), batch_size=4, jit_compile=jit))
    plain, compiled = states
    for ours, other in zip(compiled.train_model.weights, plain.train_model.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), other.numpy(), 1e-4, 1e-5)
