"""EDIT THIS FILE: a generator learns to draw digits that a critic takes for real (WGAN-GP).

The method is that of Gulrajani et al., "Improved Training of Wasserstein GANs", 2017.

    required:   create_dataset, create_model, create_loss
    used here:  turns, create_eval_dataset, create_opt, input_pre, loss_pre, grad_pre, every_steps,
                create_metrics, metric_pre, create_inference_model

`python -m ctl_core hooks` lists all hooks, and `python -m ctl_core hooks turns` explains one.
After an edit, `./train.sh --check` tries every hook in about half a minute.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl

DIGITS = Path(__file__).parent / "data/digits.npz"
LATENT = 32  # the size of the noise that becomes a picture

# A step goes through this list once: three updates of the critic, then one of the generator. Each
# turn has its own forward pass, which sees the updates before it. Hooks that declare `objective`
# get one of these words, and those that declare `turn` its place in the list.
turns = ["critic", "critic", "critic", "generator"]


# ---- Data: images, and all random numbers that a step needs -------------------------------------


def load_digits(split):
    """Returns the images of a split ("train" or "test"), float32 [n, 8, 8, 1] from 0 to 1."""
    file = np.load(DIGITS)
    images = file["images"][file[split]]
    return images[..., np.newaxis].astype(np.float32) / 16.0


def add_noise(images, config, shape):
    """Returns a dataset of the shuffled images with random numbers, without end.

    Each example has a seed, so that its random numbers are the same on any number of devices and
    after a resume.

    Args:
        images: float32 [n, 8, 8, 1]
        config: the settings of the run
        shape: of the random numbers of an image: [turns] in training, and [] in an evaluation
    """

    def draw(image, seed):
        noise_seed, place_seed = tf.unstack(tf.random.split(seed, 2))
        noise = tf.random.stateless_normal([*shape, LATENT], noise_seed)
        place = tf.random.stateless_uniform([*shape, 1, 1, 1], place_seed)
        return {"image": image, "noise": noise, "place": place}

    shuffled = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images), seed=config.seed)
    return ctl.data.with_seeds(shuffled, config.seed).map(draw)


def create_dataset(global_batch_size, config):
    """Returns images with the noise of each turn."""
    examples = add_noise(load_digits("train"), config, [len(turns)])
    return examples.batch(global_batch_size)


def create_eval_dataset(global_batch_size, config):
    """Returns each test image once, with noise."""
    images = load_digits("test")
    examples = add_noise(images, config, [])
    return examples.take(len(images)).batch(global_batch_size)


# ---- Model: two networks ------------------------------------------------------------------------


class GAN(keras.Model):
    """The generator and the critic. Called as a model, it is the generator."""

    def __init__(self, width):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((LATENT,)),
                keras.layers.Dense(4 * 4 * 2 * width, activation="silu"),
                keras.layers.Reshape((4, 4, 2 * width)),
                keras.layers.Conv2DTranspose(
                    2 * width, 4, strides=2, padding="same", activation="silu"
                ),
                keras.layers.Conv2D(width, 3, padding="same", activation="silu"),
                keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
            ]
        )
        self.critic = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(width, 3, padding="same", activation="silu"),
                keras.layers.Conv2D(2 * width, 3, strides=2, padding="same", activation="silu"),
                keras.layers.Conv2D(4 * width, 3, strides=2, padding="same", activation="silu"),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )

    def call(self, noise):
        return self.generator(noise)


def create_model(hparams):
    """Builds both networks."""
    return GAN(hparams["width"])


def create_opt(lr):
    """Creates an optimizer for each objective, by its name."""
    return {
        "critic": keras.optimizers.Adam(lr, beta_1=0.5, beta_2=0.9),
        "generator": keras.optimizers.Adam(lr, beta_1=0.5, beta_2=0.9),
    }


# ---- A turn: a forward pass, a loss, and what is differentiated ---------------------------------


def input_pre(batch, turn):
    """Returns the noise of this turn; in an evaluation, `turn` is None."""
    if turn is None:
        return batch["noise"]
    return batch["noise"][:, turn]


def loss_pre(output, batch, train_model, objective):
    """Returns what is minimized.

    The generator raises the critic's score of its images. The critic lowers it, and raises the
    score of real images.
    """
    generated_score = train_model.critic(output)
    if objective == "generator":
        return -generated_score
    return generated_score - train_model.critic(batch["image"])


def create_loss():
    """Returns the loss function: one number per example, of a tensor [b, 1]."""

    def train_loss(score):
        return score[:, 0]

    return train_loss


def gradient_penalty(critic, points):
    """Returns how far the slope of the critic at some points is from 1, squared, [b]."""
    with tf.GradientTape() as tape:
        tape.watch(points)
        score = critic(points)
    gradient = tf.reshape(tape.gradient(score, points), [-1, 64])
    return (tf.norm(gradient, axis=1) - 1.0) ** 2


def grad_pre(loss, output, batch, train_model, objective, turn, hparams):
    """Adds the gradient penalty to the loss of the critic, and names the variables to train.

    The penalty is for images between real and generated ones, as in the paper. The values in the
    dict are averaged and logged every `log_every` steps.
    """
    if objective == "generator":
        return loss, 0.0, train_model.generator.trainable_variables
    place = batch["place"][:, turn]
    between = place * batch["image"] + (1.0 - place) * output
    penalty = hparams["penalty"] * gradient_penalty(train_model.critic, between)
    logged = {"distance": -loss, "penalty": penalty}
    return loss + penalty, 0.0, train_model.critic.trainable_variables, logged


# ---- Results: pictures, a distance, and the generator -------------------------------------------


def draw_samples(step, train_model, config, chief):
    """Draws images from the same hundred noises each time, so that the pictures show progress."""
    noise = tf.random.stateless_normal([100, LATENT], seed=[0, 0])
    images = train_model.generator(noise)

    # Ten rows of ten images, each with a black border.
    tiles = tf.reshape(tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]]), [10, 10, 10, 10])
    sheet = tf.reshape(tf.transpose(tiles, [0, 2, 1, 3]), [1, 100, 100, 1])
    sheet = tf.image.resize(sheet, [300, 300], "nearest")
    tf.summary.image("samples", sheet)  # into the run's TensorBoard folder
    if chief:  # in a cluster, this function runs in every process
        path = Path(config.runs_dir, config.run_name, "samples", f"{step:06d}.png")
        tf.io.write_file(str(path), tf.io.encode_png(tf.cast(255.0 * sheet[0], tf.uint8)))


every_steps = {100: draw_samples}


class FrechetDistance(keras.Metric):
    """The distance between the means and covariances of two sets of images.

    FID is this distance between features of a large network; here it is computed on pixels.
    """

    def __init__(self):
        super().__init__()
        # Of the real and of the generated images: sums of the products of 64 pixels and a 1.
        self.products = self.add_weight((2, 65, 65), "zeros", name="products")

    def update_state(self, real, generated):
        rows = tf.reshape([real, generated], [2, -1, 64])
        # Products with a 1 are the sums of the pixels; 1 times 1 counts the images.
        rows = tf.pad(rows, [[0, 0], [0, 0], [1, 0]], constant_values=1.0)
        self.products.assign_add(tf.matmul(rows, rows, transpose_a=True))

    def result(self):
        moments = self.products / self.products[:, :1, :1]
        mean = moments[:, :1, 1:]
        covariance = moments[:, 1:, 1:] - tf.matmul(mean, mean, transpose_a=True)
        real, generated = tf.unstack(covariance)
        eigenvalues = tf.linalg.eigvals(real @ generated)
        shared = tf.reduce_sum(tf.math.real(tf.sqrt(eigenvalues)))
        return tf.norm(mean[0] - mean[1]) ** 2 + tf.linalg.trace(real + generated) - 2.0 * shared


def create_metrics():
    """Returns the metrics that an evaluation reports next to the loss."""
    return {"frechet": FrechetDistance()}


def metric_pre(output, batch):
    """Returns the arguments of the metric's update_state."""
    return batch["image"], output


def create_inference_model(model):
    """Returns what predict, load and export run: noise in, images out."""
    return model.generator
