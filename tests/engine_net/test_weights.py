"""Tests that the engine trains the weights of a plain loop, on any number of devices."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core

from .reference_loop import (
    BATCH_SIZE,
    LEARNING_RATE,
    Train,
    assert_close,
    assert_equal,
    create_arrays,
    create_hooks,
    create_model,
    train_plainly,
)

STEPS = 14  # The number of steps exceeds two passes over the data.
SETTINGS: dict[str, Any] = {"batch_size": BATCH_SIZE, "learning_rate": LEARNING_RATE}


@pytest.mark.parametrize(
    "settings",
    [{}, {"virtual_devices": 3}, {"accumulate_steps": 3}, {"jit_compile": True}],
    ids=["one device", "three devices", "micro-batches", "compiled"],
)
def test_weights_are_those_of_a_plain_loop(train: Train, settings: dict[str, Any]) -> None:
    """Weights are equal even if three devices or micro-batches share 16 examples unevenly."""
    state = train(create_hooks(), steps=STEPS, **SETTINGS, **settings)
    assert_close(state.train_model.weights, train_plainly(STEPS).weights)


def test_smaller_last_batches_count_by_their_examples(train: Train) -> None:
    """On three devices, a last batch of 4 examples gives the same update as on one device."""

    def create_dataset(global_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(create_arrays()).batch(global_batch_size)

    hooks = create_hooks(create_dataset=create_dataset)
    one_device = train(hooks, steps=STEPS, run_name="one", last_batch="keep", **SETTINGS)
    three = train(
        hooks, steps=STEPS, run_name="three", last_batch="keep", virtual_devices=3, **SETTINGS
    )
    assert_close(three.train_model.weights, one_device.train_model.weights)


def create_model_with_noise() -> keras.Model:
    """Returns a model whose training draws random numbers and keeps moving statistics."""
    return keras.Sequential(
        [
            create_model().layers[0],
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dropout(0.3, seed=3),
            keras.layers.Dense(1),
        ]
    )


@pytest.mark.parametrize("devices", [1, 3])
def test_resumed_run_has_the_bits_of_an_undisturbed_one(train: Train, devices: int) -> None:
    """A run that stops after 5 steps, in the middle of a pass, resumes without any difference."""
    settings = {**SETTINGS, "virtual_devices": devices, "deterministic": True, "ckpt_every": 5}
    settings["eval_every"] = 5  # Evaluations must not change training.
    hooks = create_hooks(create_model=create_model_with_noise)
    whole = train(hooks, steps=STEPS, run_name="whole", **settings)
    train(hooks, steps=5, run_name="stopped", **settings)
    resumed = train(hooks, steps=STEPS, run_name="stopped", **settings)
    assert_equal(resumed.train_model.weights, whole.train_model.weights)
    assert_equal(resumed.optimizer.variables, whole.optimizer.variables)


def test_damaged_checkpoint_falls_back_to_the_one_before(train: Train, tmp_path: Path) -> None:
    """If the newest file is truncated, as by a power cut, training resumes from step 5."""
    settings = {**SETTINGS, "ckpt_every": 5}
    train(create_hooks(), steps=10, **settings)
    (data,) = (tmp_path / "run" / "ckpt").glob("ckpt-10.data-*")
    data.write_bytes(data.read_bytes()[:20])
    state = train(create_hooks(), steps=STEPS, **settings)
    assert_close(state.train_model.weights, train_plainly(STEPS).weights)
    assert "step 10 is damaged" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize("devices", [1, 3])
def test_evaluation_counts_each_example_once(train: Train, devices: int) -> None:
    """Metrics are exact even if the last of three batches has only 5 examples for three devices."""
    state = train(
        create_hooks(), steps=STEPS, eval_every=STEPS, virtual_devices=devices, **SETTINGS
    )
    model = train_plainly(STEPS)
    inputs, targets = create_arrays()
    differences = model(inputs[-37:]).numpy() - targets[-37:]
    loss = np.mean(differences**2) + float(sum(model.losses))
    assert state.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert state.metrics["error"] == pytest.approx(np.mean(np.abs(differences)), rel=1e-5)


def test_loaded_model_gives_the_output_of_the_trained_one(train: Train, tmp_path: Path) -> None:
    hooks = create_hooks()
    state = train(hooks, steps=3, **SETTINGS)
    inputs, _ = create_arrays()
    loaded = ctl_core.load(tmp_path / "run", callbacks=hooks)
    assert_equal(loaded.model.weights, state.train_model.weights)
    np.testing.assert_allclose(loaded(inputs), state.train_model(inputs), rtol=1e-5)


def test_mistake_is_one_line_that_names_hook_and_file(train: Train) -> None:
    """The error reports a loss that is a mean, which would make gradients 16 times too small."""

    def create_mean() -> Any:
        return keras.losses.MeanSquaredError()

    with pytest.raises(ctl_core.CtlError) as caught:
        train(create_hooks(create_loss=create_mean), steps=1, **SETTINGS)
    message = str(caught.value)
    assert message.startswith("create_loss (test_weights.py:")
    assert "\n" not in message
