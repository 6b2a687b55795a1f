"""Tests of the examples that download their data, cifar10_vgg and fashion_mnist."""

import gzip
import io
import runpy
import tarfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.example import Example, assert_lives
from tests.helpers.project import Cli, Train

SMALL = ("--batch-size", "8", "--hparams.width", "4", "--learning-rate", "0.02")


def write_archive(file: Path) -> None:
    """Writes 64 images in the binary format of CIFAR-10: a label, then three planes of 32 × 32."""
    random = np.random.default_rng(0)
    with tarfile.open(file, "w:gz") as archive:
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
            number = 24 if name == "test_batch" else 8
            labels = random.integers(0, 10, number).astype(np.uint8)
            images = random.integers(0, 100, (number, 3, 32, 32)).astype(np.uint8)
            for image, label in zip(images, labels, strict=True):
                image[label % 3, 3 * label : 3 * label + 4] += 150
            content = np.concatenate([labels[:, None], images.reshape(number, -1)], 1).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def example(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """Returns the example with a small archive instead of the one that it downloads."""
    write_archive(tmp_path / "cifar.tar.gz")
    monkeypatch.setattr(keras.utils, "get_file", lambda **_: tmp_path / "cifar.tar.gz")
    return Example("cifar10_vgg", cli, tmp_path, *SMALL)


def test_pictures_and_their_changes(example: Example) -> None:
    """The hooks read images the right way up, and their random changes are reproducible.

    Labels are smoothed in training only. The optimizer decays only kernels.
    """
    hooks = runpy.run_path(str(example.folder / "callbacks.py"))
    config = ctl_core.Config(steps=1, hparams={"width": 4, "decay": 0.0005, "smoothing": 0.1})
    pictures, labels = hooks["load_pictures"]("test")
    assert pictures.shape == (24, 32, 32, 3)
    assert labels.dtype == tf.int64
    for picture, label in zip(pictures.numpy(), labels.numpy(), strict=True):
        bright = picture[3 * label : 3 * label + 4, :, label % 3]
        assert bright.min() >= 150 > np.delete(picture, label % 3, axis=-1).max()

    drawn = [list(hooks["create_dataset"](8, config).take(11)) for _ in range(2)]
    for (images, _), (images_again, _) in zip(*drawn, strict=True):
        np.testing.assert_array_equal(images, images_again)
    assert drawn[0][0][0].shape == (8, 32, 32, 3)
    plain = hooks["load_pictures"]("train")[0].numpy()
    changed = [image for images, _ in drawn[0][:5] for image in images.numpy()]
    assert sum(any((image == p).all() for p in plain) for image in changed) < 5

    loss = hooks["create_loss"](config.hparams)
    logits, label = tf.constant([[9.0] + 9 * [0.0]]), tf.constant([0], tf.int64)
    probability = np.exp(9.0) / (np.exp(9.0) + 9)
    rest = 1 / (np.exp(9.0) + 9)
    smoothed = -(0.91 * np.log(probability) + 0.09 * np.log(rest))
    np.testing.assert_allclose(loss((logits, label), training=False), [-np.log(probability)], 1e-3)
    np.testing.assert_allclose(loss((logits, label), training=True), [smoothed], 1e-5)

    model = hooks["create_model"](config.hparams)
    (decayed, kernels), (_, others) = hooks["create_opt"](0.1, model, config.hparams)
    assert decayed.weight_decay == 0.0005
    assert {v.name for v in kernels} == {"kernel"}
    assert {"mixture", "gamma", "beta", "bias"} == {v.name for v in others}
    assert len(kernels) + len(others) == len(model.trainable_variables)
    pooling = next(layer for layer in model.layers if type(layer).__name__ == "MixedPooling")
    square = np.array([[1, 2], [3, 6]], "float32").reshape(1, 2, 2, 1)
    pooling.mixture.assign(np.log(3.0))  # a mixture of 3/4 maximum and 1/4 mean
    np.testing.assert_allclose(pooling(square), [[[[0.75 * 6 + 0.25 * 3]]]], rtol=1e-6)
    assert isinstance(decayed, keras.optimizers.SGD)


@pytest.mark.slow
def test_example_is_trained_killed_resumed_and_served(example: Example) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3)).astype("uint8")
    # A rounding difference occasionally flips a ReLU, and batch normalization over 8 images
    # amplifies this.
    assert_lives(example, pictures, atol=1e-3)
    numbers = example.numbers("whole")
    group = "optimizer/optimizers/1/_trainable_variables"
    mixtures = [value for name, value in numbers.items() if group in name and value.shape == ()]
    assert len(mixtures) == 3
    assert all(mixtures)


# ---- fashion_mnist, compared with the loop of TensorFlow's tutorial ------------------------------

SMALL_CLOTHES = ("--batch-size", "16")  # 40 images make two whole batches and one of 8
DEVICES, RATE = 2, 0.001
# Few steps, because a rounding difference occasionally flips a ReLU, and Adam amplifies this.
STEPS = 3


@pytest.fixture
def clothes(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """Returns the example with small files instead of the ones that it downloads."""
    random = np.random.default_rng(0)
    for split, number in (("train", 40), ("t10k", 24)):
        labels = random.integers(0, 10, number).astype(np.uint8)
        images = random.integers(0, 250, (number, 28, 28)).astype(np.uint8)
        for kind, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            content = gzip.compress(bytes(header) + array.tobytes())
            (tmp_path / f"{split}-{kind}-ubyte.gz").write_bytes(content)
    monkeypatch.setattr(keras.utils, "get_file", lambda name, *_, **__: tmp_path / name)
    return Example("fashion_mnist", cli, tmp_path, *SMALL_CLOTHES)


def tutorials_loop(hooks: dict[str, Any]) -> list[Any]:
    """Trains with the tutorial's loop, in the hooks' order of the data, and returns the weights."""
    # TensorFlow's default reduction over devices would conflict with strategies of other sizes in
    # this process.
    on_one = tf.distribute.ReductionToOneDevice()
    devices = [f"CPU:{i}" for i in range(DEVICES)]
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=on_one)
    config = ctl_core.Config(steps=STEPS)
    # A shuffle with a seed depends on the global seed, too.
    keras.utils.set_random_seed(config.seed)
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
def test_weights_are_those_of_the_tutorials_loop(train: Train, clothes: Example) -> None:
    """Training with the hooks has the same weights as the tutorial's loop.

    The L2 penalty is larger than in the example, so that a penalty that is counted twice would
    show.
    """
    hooks = runpy.run_path(str(clothes.folder / "callbacks.py"))
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
    for weight, other, start in zip(state.train_model.get_weights(), expected, before, strict=True):
        assert np.abs(other - start).max() > 1e-4
        np.testing.assert_allclose(weight, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_example_clothes_is_trained_killed_resumed_and_served(clothes: Example) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28, 1)).astype("uint8")
    assert_lives(clothes, images)
