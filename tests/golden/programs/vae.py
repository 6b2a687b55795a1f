"""A variational autoencoder, after Keras' example: encoder, sampling layer, decoder, KL term.

The KL term is either part of each example's loss, or the mean over a batch that a layer adds with
``add_loss``. Both give the same training. Weights are regularized, too.

Noise is drawn from a seed per example, so that it does not depend on the number of devices. With
``own_noise``, the layer's generator draws the noise, as in the example. Each device then draws
different noise, so that only a run on one device can be compared with the plain loop.
"""

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core import data
from tests.golden import small
from tests.golden.catalogue import Program

PIXELS = 12
LATENT = 2
IMAGES = np.random.default_rng(0).uniform(size=(44, PIXELS)).astype("float32").round()


def with_noise(image: Any, seed: Any) -> Any:
    return image, tf.random.stateless_normal([LATENT], seed)


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    images = tf.data.Dataset.from_tensor_slices(IMAGES)
    return data.with_seeds(images, seed=5).map(with_noise).batch(per_replica_batch_size)


def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    images = data.with_seeds(tf.data.Dataset.from_tensor_slices(IMAGES), seed=6).take(len(IMAGES))
    return images.map(with_noise).batch(per_replica_batch_size)


def kl_of(mean: Any, log_variance: Any) -> Any:
    return -0.5 * tf.reduce_sum(1.0 + log_variance - mean**2 - tf.exp(log_variance), axis=1)


class Sampling(keras.layers.Layer):
    """Samples a point for each example, with noise from the layer's generator if ``own_noise``."""

    def __init__(self, own_noise: bool, adds_loss: bool) -> None:
        super().__init__()
        self.own_noise = own_noise
        self.adds_loss = adds_loss
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_variance, noise = inputs
        if self.own_noise:
            noise = keras.random.normal(tf.shape(mean), seed=self.seed_generator)
        if self.adds_loss:
            self.add_loss(tf.reduce_mean(kl_of(mean, log_variance)))
        return mean + tf.exp(0.5 * log_variance) * noise


class VAE(keras.Model):
    """An encoder, a sampling layer and a decoder."""

    def __init__(self, own_noise: bool, adds_loss: bool) -> None:
        super().__init__()
        image = keras.Input((PIXELS,))
        regular = keras.regularizers.L2(0.01)
        hidden = keras.layers.Dense(8, activation="relu", kernel_regularizer=regular)(image)
        mean = keras.layers.Dense(LATENT)(hidden)
        log_variance = keras.layers.Dense(LATENT)(hidden)
        self.encoder = keras.Model(image, [mean, log_variance])
        self.sampling = Sampling(own_noise, adds_loss)
        self.decoder = keras.Sequential(
            [
                keras.Input((LATENT,)),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.Dense(PIXELS, activation="sigmoid"),
            ]
        )

    def call(self, inputs: Any) -> Any:
        image, noise = inputs
        mean, log_variance = self.encoder(image)
        return self.decoder(self.sampling([mean, log_variance, noise])), mean, log_variance


def create_model(own_noise: bool = False, adds_loss: bool = False) -> keras.Model:
    keras.utils.set_random_seed(1)
    return VAE(own_noise, adds_loss)


class Loss:
    """Computes the reconstruction loss of each example and, if ``with_kl``, adds its KL term."""

    def __init__(self, with_kl: bool) -> None:
        self.with_kl = with_kl

    def __call__(self, loss_input: Any) -> Any:
        (reconstruction, mean, log_variance), image = loss_input
        loss = PIXELS * keras.losses.binary_crossentropy(image, reconstruction)
        return loss + kl_of(mean, log_variance) if self.with_kl else loss


def create_metrics() -> dict[str, keras.Metric]:
    return {
        "reconstruction": keras.metrics.Mean(),
        "kl": keras.metrics.Mean(),
        "accuracy": keras.metrics.BinaryAccuracy(),
    }


def metric_pre(output: Any, batch: Any) -> Any:
    reconstruction, mean, log_variance = output
    image, _ = batch
    return {
        "reconstruction": PIXELS * keras.losses.binary_crossentropy(image, reconstruction),
        "kl": kl_of(mean, log_variance),
        "accuracy": (image, reconstruction),
    }


def hooks(own_noise: bool = False, adds_loss: bool = False) -> SimpleNamespace:
    program = small.hooks(
        create_dataset=create_dataset,
        create_eval_dataset=create_eval_dataset,
        create_model=lambda: create_model(own_noise, adds_loss),
        create_loss=lambda: Loss(with_kl=not adds_loss),
        input_pre=lambda batch: batch,
        loss_pre=lambda output, batch: (output, batch[0]),
        create_metrics=create_metrics,
        metric_pre=metric_pre,
    )
    del program.update_pre, program.every_steps  # the engine's defaults are used
    return program


PROGRAM = Program(
    lambda: hooks(adds_loss=True), weights=lambda state: state.train_model.trainable_variables
)
