"""The example diffusion: one and two devices, killed and resumed, its network and its drawings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.example import Example, assert_lives
from tests.helpers.project import Cli

SMALL = ("--hparams.width", "4", "--hparams.drawing_steps", "3", "--hparams.ema", "0.5")
BATCHES = ("--batch-size", "8", "--eval-batch-size", "64")


@pytest.mark.slow
def test_lives(cli: Cli, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=(5, 8, 8, 1)).astype("float32")
    example = Example("diffusion", cli, tmp_path, *SMALL, *BATCHES)
    hooks = tmp_path / "callbacks.py"
    hooks.write_text(hooks.read_text().replace("every_steps = {500:", "every_steps = {3:"))
    assert_lives(example, {"noise": noise})
    assert_draws_by_the_average(tmp_path / "runs" / "whole", noise)
    sheets = [tmp_path / f"runs/{name}/samples/000006.png" for name in ("whole", "parts")]
    assert sheets[0].read_bytes() == sheets[1].read_bytes()


def assert_draws_by_the_average(run: Path, noise: np.ndarray) -> None:
    """A drawing is DDIM's, in NumPy, of the network that follows the trained one."""
    served = ctl_core.load(run)
    found = np.asarray(served({"noise": noise}))
    network = served.model.__self__.network
    image = noise.astype("float64")
    for time in (1.0, 2.0 / 3.0, 1.0 / 3.0):
        much, of_image, less, of_clean = *rates(time), *rates(time - 1.0 / 3.0)
        waves = 2.0 * np.pi * much * np.exp(np.linspace(0.0, 4.0, 8))
        rate = np.tile(np.concatenate([np.sin(waves), np.cos(waves)]), (5, 1, 1, 1))
        noises = network([tf.constant(image, tf.float32), tf.constant(rate, tf.float32)]).numpy()
        clean = np.clip((image - much * noises) / of_image, -1.0, 1.0)
        image = of_clean * clean + less * noises
    np.testing.assert_allclose(found, clean, atol=1e-4)
    # The first kernel, as the optimizer has it trained, and as it is followed.
    reader = tf.train.load_checkpoint(str(run / "ckpt" / "ckpt-6"))
    trained = reader.get_tensor("optimizer/_trainable_variables/0/.ATTRIBUTES/VARIABLE_VALUE")
    (followed,) = (w.numpy() for w in network.weights if w.shape == (3, 3, 1, 4))
    assert trained.shape == followed.shape
    assert 1e-6 < np.abs(trained - followed).max() < 0.1


def rates(time: float) -> tuple[float, float]:
    """How much noise and how much image there is, as the paper's cosine schedule has it."""
    start, end = np.arccos(0.95), np.arccos(0.02)
    return np.sin(start + time * (end - start)), np.cos(start + time * (end - start))
