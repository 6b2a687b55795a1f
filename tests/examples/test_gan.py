"""The example ``gan``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.example import Example
from tests.helpers.rendering import Render


@pytest.mark.slow
def test_gan(render: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example("gan", render, tmp_path, monkeypatch, hparams={"width": 2}, log_every=4)
    example.assert_same_on_two_devices()
    example.assert_resumes()
    noise = np.random.default_rng(0).normal(size=(3, 32)).astype("float32")
    images = example.assert_is_used({"noise": noise})
    assert images.shape == (3, 8, 8, 1)
    assert 0.0 <= np.min(images) < np.max(images) <= 1.0
    trained = example.train("on-2", steps=4, virtual_devices=2)  # as it is there
    (line,) = (line for line in trained.history if "penalty" in line)
    assert np.isfinite(line["distance"]) and line["penalty"] > 0.0
    example.command("predict", "--run-name", "on-2")
    assert_frechet(example, trained.metrics["frechet"])
    assert_drawn(example, trained)


def assert_frechet(example: Example, found: float) -> None:
    """The metric, of two devices, is what NumPy makes of the images that one predicts."""
    data = example.hooks().create_eval_dataset(64, ctl_core.load_config("config.yaml"))
    real = np.concatenate([batch["image"] for batch in data])
    with np.load("runs/on-2/predictions.npz") as file:
        made = file["output"]
    one, other = (images.reshape(len(real), 64).astype("float64") for images in (real, made))
    a, b = np.cov(one.T, bias=True), np.cov(other.T, bias=True)
    shared = np.sqrt(np.linalg.eigvals(a @ b).astype(complex)).real.sum()
    expected = ((one.mean(0) - other.mean(0)) ** 2).sum() + np.trace(a + b) - 2.0 * shared
    np.testing.assert_allclose(found, expected, rtol=1e-2)


def assert_drawn(example: Example, trained: ctl_core.State) -> None:
    """The sheet has the hundred images of its noise, the same whenever it is drawn."""
    draw = example.hooks().draw_samples
    for chief in (False, True):
        draw(step=4, train_model=trained.train_model, config=trained.config, chief=chief)
        assert Path("runs/on-2/samples/000004.png").exists() == chief
    sheet = tf.io.decode_png(tf.io.read_file("runs/on-2/samples/000004.png")).numpy()
    noise = tf.random.stateless_normal([100, 32], seed=[0, 0])
    images = trained.train_model(noise).numpy()[..., 0]
    for number, image in ((0, images[0]), (37, images[37]), (99, images[99])):
        row, column = 30 * (number // 10) + 4, 30 * (number % 10) + 4
        part = sheet[row : row + 24 : 3, column : column + 24 : 3, 0]
        np.testing.assert_allclose(part / 255.0, image, atol=1.01 / 255.0)
