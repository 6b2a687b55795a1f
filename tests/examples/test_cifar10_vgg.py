"""The example cifar10_vgg: its data and its groups, on one and two devices, and its life."""

from __future__ import annotations

import io
import runpy
import tarfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.example import Example, assert_lives
from tests.helpers.project import Cli

SMALL = ("--batch-size", "8", "--hparams.width", "4", "--learning-rate", "0.02")


def write_archive(file: Path) -> None:
    """Writes 64 pictures, binary version: records of a label and 3 planes of 32 × 32."""
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
    """The example with a small archive in place of the one that it downloads."""
    write_archive(tmp_path / "cifar.tar.gz")
    monkeypatch.setattr(keras.utils, "get_file", lambda **_: tmp_path / "cifar.tar.gz")
    return Example("cifar10_vgg", cli, tmp_path, *SMALL)


def test_what_the_hooks_make(example: Example) -> None:
    """Pictures the right way up, changes that repeat, smoothing in training only, two groups."""
    hooks = runpy.run_path(str(example.folder / "callbacks.py"))
    config = ctl_core.Config(steps=1, hparams={"width": 4, "decay": 0.0005, "smoothing": 0.1})
    pictures, labels = hooks["load_pictures"]("test")
    assert pictures.shape == (24, 32, 32, 3) and labels.dtype == tf.int64
    for picture, label in zip(pictures.numpy(), labels.numpy(), strict=True):
        bright = picture[3 * label : 3 * label + 4, :, label % 3]
        assert bright.min() >= 150 > np.delete(picture, label % 3, axis=-1).max()

    drawn = [list(hooks["create_dataset"](8, config).take(11)) for _ in range(2)]
    for (one, _), (other, _) in zip(*drawn, strict=True):
        np.testing.assert_array_equal(one, other)
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
    assert decayed.weight_decay == 0.0005 and {v.name for v in kernels} == {"kernel"}
    assert {"mixture", "gamma", "beta", "bias"} == {v.name for v in others}
    assert len(kernels) + len(others) == len(model.trainable_variables)
    pooling = next(layer for layer in model.layers if type(layer).__name__ == "MixedPooling")
    square = np.array([[1, 2], [3, 6]], "float32").reshape(1, 2, 2, 1)
    pooling.mixture.assign(np.log(3.0))  # three quarters of the maximum
    np.testing.assert_allclose(pooling(square), [[[[0.75 * 6 + 0.25 * 3]]]], rtol=1e-6)
    assert isinstance(decayed, keras.optimizers.SGD)


@pytest.mark.slow
def test_lives(example: Example) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3)).astype("uint8")
    # Rounding turns a ReLU now and then, which batch normalisation of 8 pictures makes much of.
    assert_lives(example, pictures, atol=1e-3)
    found = example.numbers("whole")
    group = "optimizer/optimizers/1/_trainable_variables"
    mixtures = [value for name, value in found.items() if group in name and value.shape == ()]
    assert len(mixtures) == 3 and all(mixtures)  # they began with 0
