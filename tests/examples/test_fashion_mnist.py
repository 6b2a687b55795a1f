"""The example fashion_mnist beside the loop of TensorFlow's tutorial, and its life."""

from __future__ import annotations

import gzip
import runpy
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.example import Example, assert_lives
from tests.helpers.fixtures import Train
from tests.helpers.project import Cli

SMALL = ("--batch-size", "16")  # of 40 images: two batches, and one of 8
DEVICES, RATE = 2, 0.001
STEPS = 3  # few: rounding turns one of half a million ReLUs now and then, which Adam makes much of


@pytest.fixture
def example(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """The example with small files in place of those that it downloads."""
    random = np.random.default_rng(0)
    for part, number in (("train", 40), ("t10k", 24)):
        labels = random.integers(0, 10, number).astype(np.uint8)
        images = random.integers(0, 250, (number, 28, 28)).astype(np.uint8)
        for kind, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            content = gzip.compress(bytes(header) + array.tobytes())
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(content)
    monkeypatch.setattr(keras.utils, "get_file", lambda name, *_, **__: tmp_path / name)
    return Example("fashion_mnist", cli, tmp_path, *SMALL)


def tutorials_loop(hooks: dict[str, Any]) -> list[Any]:
    """The loop as the tutorial has it, but for its data's order, which is that of the hooks."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])
    config = ctl_core.Config(steps=STEPS)
    keras.utils.set_random_seed(config.seed)  # which a shuffle with a seed looks at, too
    dataset = hooks["create_dataset"](16, config).repeat()
    dataset = dataset.map(lambda images, labels: (tf.cast(images, tf.float32) / 255.0, labels))
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = hooks["create_model"]({"l2": 0.01})
        optimizer = hooks["create_opt"](RATE)
        optimizer.build(model.trainable_variables)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels: Any, predictions: Any, model_losses: Any) -> Any:
        loss = tf.nn.compute_average_loss(loss_object(labels, predictions))
        return loss + tf.nn.scale_regularization_loss(tf.add_n(model_losses))

    def train_step(inputs: Any) -> None:
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def distributed_train_step(dataset_inputs: Any) -> None:
        strategy.run(train_step, args=(dataset_inputs,))

    for _ in range(STEPS):
        distributed_train_step(next(batches))
    return [np.array(weight) for weight in model.get_weights()]


@pytest.mark.slow
def test_weights_are_those_of_the_tutorials_loop(train: Train, example: Example) -> None:
    """With more L2 than there, so that one that is counted twice shows."""
    hooks = runpy.run_path(str(example.folder / "callbacks.py"))
    create_model = hooks["create_model"]

    def seeded(hparams: Any) -> Any:
        keras.utils.set_random_seed(1)
        return create_model(hparams)

    expected = tutorials_loop(hooks)
    state = train(
        {**hooks, "create_model": seeded},
        steps=STEPS,
        learning_rate=RATE,
        virtual_devices=DEVICES,
        last_batch="keep",
        hparams={"l2": 0.01},
    )
    before = seeded({"l2": 0.01}).get_weights()
    for found, other, start in zip(state.train_model.get_weights(), expected, before, strict=True):
        assert np.abs(other - start).max() > 1e-4
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_lives(example: Example) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28, 1)).astype("uint8")
    assert_lives(example, images)
