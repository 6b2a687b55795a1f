"""Diffusion with a moving average of the network, after Keras' example of DDIM.

A small U-Net learns to predict the noise in noisy images. The evaluation uses a second network,
whose weights follow those of the first. The program differs from the example in two ways, so that
it does not depend on the number of devices. Noise is drawn from a seed per example. Batch
normalization is replaced by layer normalization, which does not depend on a replica's batch.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core import data
from tests.golden import small
from tests.golden.catalogue import Program

IMAGES = np.random.default_rng(0).uniform(size=(40, 4, 4, 1)).astype("float32")
FOLLOW = 0.9


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
    """Encodes the noise variance of an image as sines and cosines."""

    def call(self, variance: Any) -> Any:
        angles = 2.0 * math.pi * tf.constant([1.0, 3.0]) * variance
        return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)


def create_network() -> keras.Model:
    noisy = keras.Input((4, 4, 1))
    variance = keras.Input((1, 1, 1))
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
    """Trains ``network``, and uses ``ema_network`` in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = keras.layers.Normalization()
        self.normalizer.adapt(IMAGES)
        self.network = create_network()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())

    def call(self, inputs: Any, training: bool = False) -> Any:
        images, noises, times = inputs
        images = self.normalizer(images)
        start = math.acos(0.95)
        end = math.acos(0.02)
        noise_rates = tf.sin(start + times * (end - start))
        signal_rates = tf.cos(start + times * (end - start))
        noisy = signal_rates * images + noise_rates * noises
        network = self.network if training else self.ema_network
        predicted = network([noisy, noise_rates**2], training=training)
        return {
            "noises": noises,
            "found_noises": predicted,
            "images": images,
            "found_images": (noisy - noise_rates * predicted) / signal_rates,
        }


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return Diffusion()


def absolute_error(loss_input: Any) -> Any:
    predicted, true = loss_input
    return tf.reduce_mean(tf.abs(predicted - true), axis=[1, 2, 3])


def follow(train_model: Any) -> None:
    pairs = zip(train_model.ema_network.weights, train_model.network.weights, strict=True)
    for ema, weight in pairs:
        ema.assign(FOLLOW * ema + (1.0 - FOLLOW) * weight)


def create_metrics() -> dict[str, keras.Metric]:
    return {"noise": keras.metrics.MeanAbsoluteError(), "image": keras.metrics.MeanAbsoluteError()}


def metric_pre(output: Any) -> Any:
    return {
        "noise": (output["noises"], output["found_noises"]),
        "image": (output["images"], output["found_images"]),
    }


def adamw(lr: Any) -> keras.Optimizer:
    return keras.optimizers.AdamW(lr, weight_decay=1e-2)


def hooks(create_opt: Callable[[Any], keras.Optimizer] = small.create_opt) -> SimpleNamespace:
    return small.hooks(
        create_dataset=create_dataset,
        create_eval_dataset=create_eval_dataset,
        create_model=create_model,
        create_loss=lambda: absolute_error,
        create_opt=create_opt,
        input_pre=lambda batch: batch,
        loss_pre=lambda output: (output["found_noises"], output["noises"]),
        grad_pre=lambda loss, train_model: (loss, 0.0, train_model.network.trainable_variables),
        update_post=follow,
        create_metrics=create_metrics,
        metric_pre=metric_pre,
    )


PROGRAM = Program(hooks, settings={"learning_rate": 0.5}, frozen="^normalization")
