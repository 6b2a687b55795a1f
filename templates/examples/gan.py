"""WGAN-GP (Gulrajani and others, 2017): a generator learns to draw digits from a critic, in turns
with it. All hooks and their defaults: `python -m ctl_core hooks`.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl

DIGITS = Path(__file__).parent / "data/digits.npz"
LATENT = 32  # numbers that a picture is made of
# A step goes through this list once. Hooks that name `objective` get one of these words, and as
# `turn` its place in the list. Each turn sees what the turns before it have changed.
turns = 3 * ["critic"] + ["generator"]


# ---- Data: images, and with them all random numbers that a step needs ---------------------------
# Of a seed for each example, they are the same on any number of devices, and after a resume.
def digits(part, config, *turns):
    """Returns images of 8 by 8 pixels from 0 to 1 with noise, without end; and how many differ."""

    def add_noise(image, seed):
        one, other = tf.unstack(tf.random.split(seed, 2))
        noise = tf.random.stateless_normal([*turns, LATENT], one)
        between = tf.random.stateless_uniform([*turns, 1, 1, 1], other)
        return {"image": image, "noise": noise, "between": between}

    file = np.load(DIGITS)
    images = file["images"][file[part], :, :, None].astype(np.float32) / 16.0
    shuffled = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images), seed=config.seed)
    return ctl.data.with_seeds(shuffled, config.seed).map(add_noise), len(images)


def create_dataset(global_batch_size, config):
    return digits("train", config, len(turns))[0].batch(global_batch_size)


def create_eval_dataset(global_batch_size, config):
    endless, one_pass = digits("test", config)
    return endless.take(one_pass).batch(global_batch_size)


# ---- Two networks in one model ------------------------------------------------------------------
class GAN(keras.Model):
    def __init__(self, width):
        super().__init__()
        layers, silu = keras.layers, {"padding": "same", "activation": "silu"}
        self.generator = keras.Sequential([
            keras.Input((LATENT,)), layers.Dense(4 * 4 * 2 * width, activation="silu"),
            layers.Reshape((4, 4, 2 * width)), layers.Conv2DTranspose(2 * width, 4, 2, **silu),
            layers.Conv2D(width, 3, **silu), layers.Conv2D(1, 3, 1, "same", activation="sigmoid"),
        ])  # fmt: skip
        self.critic = keras.Sequential([
            keras.Input((8, 8, 1)), layers.Conv2D(width, 3, **silu),
            layers.Conv2D(2 * width, 3, 2, **silu), layers.Conv2D(4 * width, 3, 2, **silu),
            layers.Flatten(), layers.Dense(1),
        ])  # fmt: skip

    def call(self, noise):  # as a model, the generator; the hooks below ask the critic
        return self.generator(noise)


def create_model(hparams):
    return GAN(hparams["width"])


def create_opt(lr):
    """Returns an optimizer for each objective, by its name."""
    return {name: keras.optimizers.Adam(lr, 0.5, 0.9) for name in ("critic", "generator")}


# ---- A turn: a forward pass, a loss, and what that is differentiated by -------------------------
def input_pre(batch, turn):
    return batch["noise"] if turn is None else batch["noise"][:, turn]  # None: an evaluation


def loss_pre(output, batch, train_model, objective):
    made = train_model.critic(output)
    return -made if objective == "generator" else made - train_model.critic(batch["image"])


def create_loss():
    return lambda loss_input: loss_input[:, 0]  # one number per example


def grad_pre(loss, output, batch, train_model, objective, turn, hparams):
    if objective == "generator":
        return loss, 0.0, train_model.generator.trainable_variables
    between = batch["between"][:, turn]
    points = between * batch["image"] + (1.0 - between) * output
    with tf.GradientTape() as tape:
        tape.watch(points)
        said = train_model.critic(points)
    slope = tf.norm(tf.reshape(tape.gradient(said, points), [-1, 64]), axis=1)
    penalty = hparams["penalty"] * (slope - 1.0) ** 2
    logged = {"distance": -loss, "penalty": penalty}  # every log_every steps
    return loss + penalty, 0.0, train_model.critic.trainable_variables, logged


# ---- What has been learnt: pictures, a distance, a generator ------------------------------------
def draw_samples(step, train_model, config, chief):
    """Draws the same hundred noises each time, so that the pictures show how they change."""
    noise = tf.random.stateless_normal([100, LATENT], seed=[0, 0])
    images = tf.pad(train_model.generator(noise), [[0, 0], [1, 1], [1, 1], [0, 0]])
    sheet = tf.transpose(tf.reshape(images, [10, 10, 10, 10]), [0, 2, 1, 3])
    sheet = tf.image.resize(tf.reshape(sheet, [1, 100, 100, 1]), [300, 300], "nearest")
    tf.summary.image("samples", sheet)  # into the run's TensorBoard folder
    if chief:  # in a cluster this function runs in every process
        file = Path(config.runs_dir, config.run_name, "samples", f"{step:06d}.png")
        tf.io.write_file(str(file), tf.io.encode_png(tf.cast(255.0 * sheet[0], tf.uint8)))


every_steps = {100: draw_samples}


class FrechetDistance(keras.Metric):
    """As FID is worked out, but of pixels: how far means and covariances of two sets differ."""

    def __init__(self):
        super().__init__()
        self.products = self.add_weight((2, 65, 65), "zeros", name="products")

    def update_state(self, real, made):
        rows = tf.reshape([real, made], [2, -1, 64])
        rows = tf.pad(rows, [[0, 0], [0, 0], [1, 0]], constant_values=1.0)  # 1, to count and sum
        self.products.assign_add(tf.matmul(rows, rows, transpose_a=True))

    def result(self):
        moments = self.products / self.products[:, :1, :1]
        mean = moments[:, :1, 1:]
        real, made = tf.unstack(moments[:, 1:, 1:] - tf.matmul(mean, mean, transpose_a=True))
        shared = tf.reduce_sum(tf.math.real(tf.sqrt(tf.linalg.eigvals(real @ made))))
        return tf.norm(mean[0] - mean[1]) ** 2 + tf.linalg.trace(real + made) - 2.0 * shared


def create_metrics():
    return {"frechet": FrechetDistance()}


def metric_pre(output, batch):
    return batch["image"], output


def create_inference_model(model):
    """Returns what predict, load and export run: noise in, pictures out."""
    return model.generator
