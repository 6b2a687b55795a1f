"""Diffusion with a moving average of the network, after Keras' example of DDIM.

A small U-Net learns to find the noise in noisy images; evaluation uses a second network that
follows its weights. As in the example, but for two things that no number of devices can agree on:
noise is drawn from a seed of each example, and layer normalisation, which looks at one example,
is where batch normalisation, which looks at a replica's batch, was.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from ctl_core import data
from tests.helpers.fixtures import Train
from tests.helpers.lean import PYTHONPATH
from tests.helpers.resume import values
from tests.ported.compare import BATCH, RATE, STEPS, assert_close, assert_moved, numbers

IMAGES = np.random.default_rng(0).uniform(size=(40, 4, 4, 1)).astype("float32")
FOLLOW = 0.9

# ---- callbacks.py -----------------------------------------------------------------------------


def with_noise(image: Any, seed: Any) -> Any:
    noise = tf.random.stateless_normal([4, 4, 1], seed)
    return image, noise, tf.random.stateless_uniform([1, 1, 1], seed + 1)


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    images = tf.data.Dataset.from_tensor_slices(IMAGES).shuffle(40, seed=4)
    return data.with_seeds(images, seed=5).map(with_noise).batch(per_replica_batch_size)


def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    images = data.with_seeds(tf.data.Dataset.from_tensor_slices(IMAGES), seed=6).take(21)
    return images.map(with_noise).batch(per_replica_batch_size)


class Waves(keras.layers.Layer):
    """Tells the network how noisy an image is: sines and cosines of the variance."""

    def call(self, variance: Any) -> Any:
        angles = 2.0 * math.pi * tf.constant([1.0, 3.0]) * variance
        return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)


def create_network() -> keras.Model:
    noisy, variance = keras.Input((4, 4, 1)), keras.Input((1, 1, 1))
    waves = keras.layers.UpSampling2D(4, interpolation="nearest")(Waves()(variance))
    skip = keras.layers.Concatenate()([keras.layers.Conv2D(4, 3, padding="same")(noisy), waves])
    x = keras.layers.AveragePooling2D(2)(skip)
    x = keras.layers.Conv2D(4, 3, padding="same", activation="swish")(x)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.UpSampling2D(interpolation="bilinear")(x)
    x = keras.layers.Concatenate()([x, skip])
    x = keras.layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
    return keras.Model([noisy, variance], x)


class Diffusion(keras.Model):
    """Learns by ``network``; what it shows is of ``ema_network``."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = keras.layers.Normalization()
        self.network = create_network()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())

    def call(self, inputs: Any, training: bool = False) -> Any:
        images, noises, times = inputs
        images = self.normalizer(images)
        start, end = math.acos(0.95), math.acos(0.02)
        noise_rates = tf.sin(start + times * (end - start))
        signal_rates = tf.cos(start + times * (end - start))
        noisy = signal_rates * images + noise_rates * noises
        network = self.network if training else self.ema_network
        found = network([noisy, noise_rates**2], training=training)
        return {
            "noises": noises,
            "found_noises": found,
            "images": images,
            "found_images": (noisy - noise_rates * found) / signal_rates,
        }


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = Diffusion()
    model.normalizer.adapt(IMAGES)
    return model


def create_loss() -> Any:
    return absolute_error


def absolute_error(loss_input: Any) -> Any:
    found, true = loss_input
    return tf.reduce_mean(tf.abs(found - true), axis=[1, 2, 3])


def input_pre(batch: Any) -> Any:
    return batch


def loss_pre(output: Any) -> Any:
    return output["found_noises"], output["noises"]


def grad_pre(loss: Any, train_model: Any) -> Any:
    return loss, 0.0, train_model.network.trainable_variables


def follow(train_model: Any) -> None:
    for ema, weight in zip(
        train_model.ema_network.weights, train_model.network.weights, strict=True
    ):
        ema.assign(FOLLOW * ema + (1.0 - FOLLOW) * weight)


def create_metrics() -> dict[str, keras.Metric]:
    return {"noise": keras.metrics.MeanAbsoluteError(), "image": keras.metrics.MeanAbsoluteError()}


def metric_pre(output: Any) -> Any:
    return {
        "noise": (output["noises"], output["found_noises"]),
        "image": (output["images"], output["found_images"]),
    }


# ---- The same as a plain loop -----------------------------------------------------------------


def sgd(lr: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(lr)


def adamw(lr: Any) -> keras.Optimizer:
    return keras.optimizers.AdamW(lr, weight_decay=1e-2)


def hooks(create_opt: Callable[[Any], keras.Optimizer] = sgd) -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_eval_dataset=create_eval_dataset,
        create_model=create_model,
        create_loss=create_loss,
        create_opt=create_opt,
        input_pre=input_pre,
        loss_pre=loss_pre,
        grad_pre=grad_pre,
        update_post=follow,
        create_metrics=create_metrics,
        metric_pre=metric_pre,
    )


@functools.cache
def plain(create_opt: Callable[[Any], keras.Optimizer], rate: float) -> keras.Model:
    keras.utils.set_random_seed(0)  # the setting's default, from which the shuffle starts
    batches = create_dataset(BATCH).take(STEPS)
    model, optimizer = create_model(), create_opt(rate)
    before = numbers(model.network.weights)
    for batch in batches:
        with tf.GradientTape() as tape:
            output = model(batch, training=True)
            loss = tf.reduce_mean(tf.abs(output["found_noises"] - output["noises"]))
        gradients = tape.gradient(loss, model.network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.network.trainable_variables, strict=True))
        for ema, weight in zip(model.ema_network.weights, model.network.weights, strict=True):
            ema.assign(FOLLOW * ema + (1.0 - FOLLOW) * weight)
    assert_moved(before, numbers(model.network.weights))
    assert_moved(before, numbers(model.ema_network.weights))
    return model


@pytest.mark.parametrize(
    ("create_opt", "rate", "devices"), [(sgd, 0.5, 1), (sgd, 0.5, 2), (adamw, 0.01, 2)]
)
def test_both_networks_are_those_of_the_plain_loop(
    train: Train, create_opt: Any, rate: float, devices: int
) -> None:
    expected = plain(create_opt, rate)
    state = train(hooks(create_opt), steps=STEPS, batch_size=BATCH, learning_rate=rate,
                  virtual_devices=devices)  # fmt: skip
    assert_close(state.train_model.weights, expected.weights)
    output = expected(next(iter(create_eval_dataset(21))), training=False)
    noise = np.abs(output["found_noises"] - output["noises"]).mean()
    image = np.abs(output["found_images"] - output["images"]).mean()
    found = [state.metrics[name] for name in ("loss", "noise", "image")]
    np.testing.assert_allclose(found, [noise, noise, image], rtol=1e-5)


KILLED = """
import os, signal
from tests.ported.test_diffusion import *

def die(step):
    if step == 8:
        os.kill(os.getpid(), signal.SIGKILL)

create_opt = sgd
update_post = follow
at_step = {8: die}
"""


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Takes op determinism back after a test, for which TensorFlow has no public way."""
    yield
    config.disable_op_determinism()


@pytest.mark.usefixtures("deterministic")
def test_a_killed_and_resumed_run_is_the_whole_run(train: Train, tmp_path: Path) -> None:
    """A process of its own is killed between two checkpoints; the run goes on in this one."""
    (tmp_path / "callbacks.py").write_text(KILLED)
    command = [sys.executable, "-m", "ctl_core", "train", "--run-name=killed", "--steps=12"]
    command += [f"--batch-size={BATCH}", "--ckpt-every=3", "--deterministic"]
    command += [f"--learning-rate={RATE}"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    killed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    settings: dict[str, Any] = {"steps": 12, "batch_size": BATCH, "ckpt_every": 3}
    settings |= {"learning_rate": RATE, "deterministic": True}
    whole = values(train(hooks(), run_name="whole", **settings))
    rest = train(hooks(), run_name="killed", **settings)
    assert "resuming at step 6" in (tmp_path / "runs/killed/train.log").read_text()
    for path, value in values(rest).items():
        np.testing.assert_array_equal(value, whole[path], err_msg=path)
