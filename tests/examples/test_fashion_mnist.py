"""The example fashion_mnist beside the loop of TensorFlow's tutorial, and its life."""

from __future__ import annotations

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
from tests.helpers.project import Cli, refused
from tests.helpers.published import download_from, fashion_mnist

SMALL = ("--batch-size", "16")  # of 40 images: two batches, and one of 8
# Devices, steps, rate, tolerance. Few steps: rounding turns one of half a million ReLUs now and
# then, and Adam makes full steps of gradients that are next to nothing.
CASES = {"sgd": (2, 4, 0.05, 1e-5), "adam": (2, 3, 0.001, 1e-4)}


@pytest.fixture
def example(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """The example with small files to download."""
    example = Example("fashion_mnist", cli, tmp_path, *SMALL)
    fashion_mnist(tmp_path / "web")
    download_from(example, tmp_path / "web", monkeypatch)
    return example


def tutorials_loop(hooks: dict[str, Any], devices: int, steps: int, rate: float) -> list[Any]:
    """The loop as the tutorial has it, but for its data's order, which is that of the hooks."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)])
    config = ctl_core.Config(steps=steps)
    keras.utils.set_random_seed(config.seed)  # which a shuffle with a seed looks at, too
    dataset = hooks["create_dataset"](16, config).repeat()
    dataset = dataset.map(lambda images, labels: (tf.cast(images, tf.float32) / 255.0, labels))
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = hooks["create_model"]({"l2": 0.01})
        optimizer = hooks["create_opt"](rate)
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

    for _ in range(steps):
        distributed_train_step(next(batches))
    return [np.array(weight) for weight in model.get_weights()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_weights_are_those_of_the_tutorials_loop(train: Train, example: Example, case: str) -> None:
    """With more L2 than there, so that one that is counted twice shows."""
    hooks = runpy.run_path(str(example.folder / "callbacks.py"))
    if case == "sgd":
        hooks["create_opt"] = lambda lr: keras.optimizers.SGD(lr)
    create_model = hooks["create_model"]

    def seeded(hparams: Any) -> Any:
        keras.utils.set_random_seed(1)
        return create_model(hparams)

    devices, steps, rate, atol = CASES[case]
    expected = tutorials_loop(hooks, devices, steps, rate)
    state = train(
        {**hooks, "create_model": seeded},
        steps=steps,
        learning_rate=rate,
        virtual_devices=devices,
        last_batch="keep",
        hparams={"l2": 0.01},
    )
    before = seeded({"l2": 0.01}).get_weights()
    for found, other, start in zip(state.train_model.get_weights(), expected, before, strict=True):
        assert np.abs(other - start).max() > 1e-4
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=atol)


def test_what_is_downloaded(example: Example, cli: Cli, tmp_path: Path) -> None:
    """Once; a file that is not the published one is refused, as one that cannot be had is."""
    name = "keras/datasets/fashion-mnist/train-images-idx3-ubyte.gz"
    published = tmp_path / "web" / Path(name).name
    content = published.read_bytes()
    published.write_bytes(content + b"0")
    train = tuple(example.arguments("a"))
    outcome = cli(None, command=train)
    refused(outcome, "create_dataset", "file hash does not match the provided value")
    published.unlink()
    refused(cli(None, command=train), "create_", f"URL fetch failure on {published.as_uri()}")
    published.write_bytes(content)
    example.train("a")
    assert Path(name).read_bytes() == content
    published.unlink()
    example.train("b")


@pytest.mark.slow
def test_lives(example: Example) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28, 1)).astype("uint8")
    assert_lives(example, images)
