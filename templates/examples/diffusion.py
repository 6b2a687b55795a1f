"""EDIT THIS FILE: a network learns to find the noise in images, and draws digits from noise (DDIM).

The method is that of Song et al., "Denoising Diffusion Implicit Models", 2021. The images are drawn
by a second network, whose weights are a moving average of those that are trained.

    required:   create_dataset, create_model, create_loss
    used here:  create_eval_dataset, create_eval_model, update_post, create_opt, input_pre,
                loss_pre, every_steps, serve, create_inference_model

`python -m ctl_core hooks` lists all hooks, and `python -m ctl_core hooks update_post` explains one.
After an edit, `./train.sh --check` tries every hook in about half a minute.
"""

import math
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl

DIGITS = Path(__file__).parent / "data/digits.npz"


# ---- Data: images, and for each the noise and the time at which the network sees it -------------


def load_digits(split):
    """Returns the images of a split ("train" or "test"), float32 [n, 8, 8, 1] from -1 to 1."""
    file = np.load(DIGITS)
    images = file["images"][file[split]]
    return images[..., np.newaxis].astype(np.float32) / 8.0 - 1.0


def add_noise(image, seed):
    """Returns an image with noise, and with a time from 0 (little noise) to 1 (little image)."""
    noise_seed, time_seed = tf.unstack(tf.random.split(seed, 2))
    noise = tf.random.stateless_normal([8, 8, 1], noise_seed)
    time = tf.random.stateless_uniform([1, 1, 1], time_seed)
    return {"image": image, "noise": noise, "time": time}


def read_examples(images, config):
    """Returns a dataset of the shuffled images with noise, without end.

    Each example has a seed, so that its noise is the same on any number of devices and after a
    resume.
    """
    shuffled = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images), seed=config.seed)
    return ctl.data.with_seeds(shuffled, config.seed).map(add_noise)


def create_dataset(global_batch_size, config):
    """Returns the training images."""
    return read_examples(load_digits("train"), config).batch(global_batch_size)


def create_eval_dataset(global_batch_size, config):
    """Returns each test image once."""
    images = load_digits("test")
    return read_examples(images, config).take(len(images)).batch(global_batch_size)


# ---- Model: from a noisy image, and how noisy it is, to the noise -------------------------------

FIRST_ANGLE = math.acos(0.95)
LAST_ANGLE = math.acos(0.02)


def get_rates(time):
    """Returns how much noise and how much image there is at a time."""
    angle = FIRST_ANGLE + time * (LAST_ANGLE - FIRST_ANGLE)
    return tf.sin(angle), tf.cos(angle)


def embed(rate):
    """Returns 16 sines and cosines of a rate [..., 1], so that small differences become large."""
    frequencies = tf.exp(tf.linspace(0.0, 4.0, 8))
    angles = 2.0 * math.pi * rate * frequencies
    return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)


def add_block(x, condition, channels):
    """Adds two convolutions and a shortcut; `condition` is added to each pixel between them."""
    y = keras.layers.GroupNormalization(4)(x)
    y = keras.layers.Conv2D(channels, 3, padding="same")(y)
    y += keras.layers.Dense(channels)(condition)
    y = keras.layers.Activation("silu")(y)
    y = keras.layers.Conv2D(channels, 3, padding="same")(y)
    if x.shape[-1] != channels:
        x = keras.layers.Dense(channels)(x)
    return y + x


def create_model(hparams):
    """Builds a small U-Net with two resolutions."""
    width = hparams["width"]
    noisy = keras.Input((8, 8, 1))
    rate = keras.Input((1, 1, 16))
    condition = keras.layers.Dense(2 * width, activation="silu")(rate)

    fine = keras.layers.Conv2D(width, 3, padding="same")(noisy)
    fine = add_block(fine, condition, width)
    coarse = keras.layers.Conv2D(2 * width, 2, strides=2)(fine)
    for _ in range(3):
        coarse = add_block(coarse, condition, 2 * width)
    enlarged = keras.layers.Conv2DTranspose(width, 2, strides=2)(coarse)
    x = keras.layers.Concatenate()([enlarged, fine])
    x = add_block(x, condition, width)
    x = keras.layers.GroupNormalization(4)(x)
    noise = keras.layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
    return keras.Model([noisy, rate], noise)


# ---- The network that is evaluated and exported -------------------------------------------------


class Artist(keras.Model):
    """A network that follows the trained one, and draws."""

    def __init__(self, network, steps):
        super().__init__()
        self.network = network
        self.steps = steps

    def call(self, inputs):
        return self.network(inputs)

    def draw(self, noise):
        """Returns images [b, 8, 8, 1], drawn from noise of the same shape."""
        batch_size = tf.shape(noise)[0]

        def denoise(state, time):
            """Removes the noise that the network finds, and adds a little less of it again."""
            image, _ = state
            noise_rate, image_rate = get_rates(time)
            next_noise_rate, next_image_rate = get_rates(time - 1.0 / self.steps)
            rate = tf.tile(tf.reshape(embed(noise_rate), [1, 1, 1, 16]), [batch_size, 1, 1, 1])
            predicted = self.network([image, rate])
            clean = tf.clip_by_value((image - noise_rate * predicted) / image_rate, -1.0, 1.0)
            return next_image_rate * clean + next_noise_rate * predicted, clean

        times = tf.linspace(1.0, 1.0 / self.steps, self.steps)
        _, clean = tf.foldl(denoise, times, (noise, noise))
        return clean


def create_eval_model(train_model, hparams):
    """Returns a copy of the network, which `update_post` moves after each update."""
    average = keras.models.clone_model(train_model)
    average.set_weights(train_model.get_weights())
    return Artist(average, hparams["drawing_steps"])


def update_post(train_model, eval_model, hparams):
    """Moves the averaged weights a little towards the trained ones, after each update."""
    decay = hparams["ema"]
    pairs = zip(eval_model.network.variables, train_model.variables, strict=True)
    for average, weight in pairs:
        average.assign(decay * average + (1.0 - decay) * weight)


# ---- Training -----------------------------------------------------------------------------------


def create_opt(lr):
    """Creates the optimizer."""
    return keras.optimizers.Adam(lr)


def input_pre(batch):
    """Returns the noisy images, and how noisy they are."""
    noise_rate, image_rate = get_rates(batch["time"])
    noisy = image_rate * batch["image"] + noise_rate * batch["noise"]
    return noisy, embed(noise_rate)


def loss_pre(output, batch):
    """Returns the error of the predicted noise."""
    return output - batch["noise"]


def create_loss():
    """Returns the loss function: the mean absolute error of each image."""

    def train_loss(error):
        return tf.reduce_mean(tf.abs(error), axis=[1, 2, 3])

    return train_loss


# ---- Results: pictures, and a model that draws --------------------------------------------------


def draw_samples(step, eval_model, config, chief):
    """Draws images from the same hundred noises each time, so that the pictures show progress."""
    noise = tf.random.stateless_normal([100, 8, 8, 1], seed=[0, 0])
    images = eval_model.draw(noise) / 2.0 + 0.5

    # Ten rows of ten images, each with a black border.
    tiles = tf.reshape(tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]]), [10, 10, 10, 10])
    sheet = tf.reshape(tf.transpose(tiles, [0, 2, 1, 3]), [1, 100, 100, 1])
    sheet = tf.image.resize(sheet, [300, 300], "nearest")
    tf.summary.image("samples", sheet)  # into the run's TensorBoard folder
    if chief:  # in a cluster, this function runs in every process
        path = Path(config.runs_dir, config.run_name, "samples", f"{step:06d}.png")
        tf.io.write_file(str(path), tf.io.encode_png(tf.cast(255.0 * sheet[0], tf.uint8)))


every_steps = {500: draw_samples}


def serve(inputs):
    """Returns the noise that predict, load and export are given."""
    return inputs["noise"]


def create_inference_model(model):
    """Returns what predict, load and export run: noise in, images out."""
    return model.draw
