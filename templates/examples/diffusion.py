"""DDIM (Song and others, 2021): a network learns to find the noise in images, and an average of
its weights draws digits out of noise. All hooks and their defaults: `python -m ctl_core hooks`.
"""

import math
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl

DIGITS = Path(__file__).parent / "data/digits.npz"


# ---- Data: images, and with each the noise and the time at which the network sees it ------------
# Of a seed for each example, they are the same on any number of devices, and after a resume.
def digits(part, config):
    """Returns images of 8 by 8 pixels from -1 to 1 with noise, without end; and how many differ."""

    def add_noise(image, seed):
        one, other = tf.unstack(tf.random.split(seed, 2))
        time = tf.random.stateless_uniform([1, 1, 1], other)
        return {"image": image, "noise": tf.random.stateless_normal([8, 8, 1], one), "time": time}

    file = np.load(DIGITS)
    images = file["images"][file[part], :, :, None].astype(np.float32) / 8.0 - 1.0
    shuffled = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images), seed=config.seed)
    return ctl.data.with_seeds(shuffled, config.seed).map(add_noise), len(images)


def create_dataset(global_batch_size, config):
    return digits("train", config)[0].batch(global_batch_size)


def create_eval_dataset(global_batch_size, config):
    endless, one_pass = digits("test", config)
    return endless.take(one_pass).batch(global_batch_size)


# ---- The network: from a noisy image, and how noisy it is, to the noise -------------------------
def rates(time):
    """Returns how much noise and how much image there is: at 0 little noise, at 1 little else."""
    angle = math.acos(0.95) + time * (math.acos(0.02) - math.acos(0.95))
    return tf.sin(angle), tf.cos(angle)


def waves(rate):
    """Makes small differences of a rate large: its sines and cosines, from slow to fast."""
    angles = 2.0 * math.pi * rate * tf.exp(tf.linspace(0.0, 4.0, 8))
    return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)  # [..., 16]


def create_model(hparams):
    layers, width = keras.layers, hparams["width"]

    def block(x, channels):
        y = layers.Conv2D(channels, 3, padding="same")(layers.GroupNormalization(4)(x))
        y = layers.Activation("silu")(y + layers.Dense(channels)(told))  # the same for each pixel
        y = layers.Conv2D(channels, 3, padding="same")(y)
        return y + (x if x.shape[-1] == channels else layers.Dense(channels)(x))

    noisy, rate = keras.Input((8, 8, 1)), keras.Input((1, 1, 16))
    told = layers.Dense(2 * width, activation="silu")(rate)
    fine = block(layers.Conv2D(width, 3, padding="same")(noisy), width)
    coarse = layers.Conv2D(2 * width, 2, 2)(fine)
    for _ in range(3):
        coarse = block(coarse, 2 * width)
    back = layers.Conv2DTranspose(width, 2, 2)(coarse)
    x = layers.GroupNormalization(4)(block(layers.Concatenate()([back, fine]), width))
    return keras.Model([noisy, rate], layers.Conv2D(1, 1, kernel_initializer="zeros")(x))


class Artist(keras.Model):
    """What is evaluated and exported: a network that follows the trained one, and draws."""

    def __init__(self, network, steps):
        super().__init__()
        self.network, self.steps = network, steps

    def call(self, inputs):
        return self.network(inputs)

    def draw(self, noise):  # [b, 8, 8, 1]
        def once(drawn, time):
            """Takes the noise that is found out, and a little less of it in again."""
            (much, of_image), (less, of_clean) = rates(time), rates(time - 1.0 / self.steps)
            rate = tf.tile(tf.reshape(waves(much), [1, 1, 1, 16]), [tf.shape(noise)[0], 1, 1, 1])
            found = self.network([drawn[0], rate])
            clean = tf.clip_by_value((drawn[0] - much * found) / of_image, -1.0, 1.0)
            return of_clean * clean + less * found, clean

        return tf.foldl(once, tf.linspace(1.0, 1.0 / self.steps, self.steps), (noise, noise))[1]


def create_eval_model(train_model, hparams):
    average = keras.models.clone_model(train_model)
    average.set_weights(train_model.get_weights())
    return Artist(average, hparams["drawing_steps"])


def update_post(train_model, eval_model, hparams):
    """Moves the averaged network after each update."""
    for average, weight in zip(eval_model.network.variables, train_model.variables, strict=True):
        average.assign(hparams["ema"] * average + (1.0 - hparams["ema"]) * weight)


# ---- Training -----------------------------------------------------------------------------------
def create_opt(lr):
    return keras.optimizers.Adam(lr)


def input_pre(batch):
    much, of_image = rates(batch["time"])
    return of_image * batch["image"] + much * batch["noise"], waves(much)


def loss_pre(output, batch):
    return output - batch["noise"]


def create_loss():
    """Returns the loss of each example."""
    return lambda difference: tf.reduce_mean(tf.abs(difference), axis=[1, 2, 3])


# ---- What has been learnt: pictures -------------------------------------------------------------
def draw_samples(step, eval_model, config, chief):
    """Draws out of the same hundred noises each time, so that the pictures show what changes."""
    images = eval_model.draw(tf.random.stateless_normal([100, 8, 8, 1], seed=[0, 0])) / 2.0 + 0.5
    images = tf.reshape(tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]]), [10, 10, 10, 10])
    sheet = tf.reshape(tf.transpose(images, [0, 2, 1, 3]), [1, 100, 100, 1])
    sheet = tf.image.resize(sheet, [300, 300], "nearest")
    tf.summary.image("samples", sheet)  # into the run's TensorBoard folder
    if chief:  # in a cluster this function runs in every process
        file = Path(config.runs_dir, config.run_name, "samples", f"{step:06d}.png")
        tf.io.write_file(str(file), tf.io.encode_png(tf.cast(255.0 * sheet[0], tf.uint8)))


every_steps = {500: draw_samples}


def serve(inputs):
    """Returns the noise that predict, load and export are given."""
    return inputs["noise"]


def create_inference_model(model):
    """Returns what predict, load and export run: noise in, drawings out."""
    return model.draw
