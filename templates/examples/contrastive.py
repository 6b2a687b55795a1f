"""SimCLR (Chen and others, 2020): what digits look like is learnt without labels, from two views of
each, beside linear probes. All hooks and their defaults: `python -m ctl_core hooks`.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl

DIGITS = Path(__file__).parent / "data/digits.npz"
PROBED = ("features", "pixels")  # what digits are told from, by a linear layer each


# ---- Data: two views of each image to train on, the image itself to evaluate --------------------
def load_digits(part):
    """Returns images, float32 [n, 8, 8, 1] from 0 to 1, and labels, int64 [n]."""
    file = np.load(DIGITS)
    rows = file[part]
    return file["images"][rows, :, :, None] / np.float32(16.0), file["labels"][rows].astype(int)


def view(image, seed):
    """Turns, stretches, slants and moves an image, and makes it lighter or darker."""
    change = tf.random.stateless_uniform([7], seed, -1.0, 1.0)
    a, b, c, d = tf.unstack([1.0, 0.0, 0.0, 1.0] + 0.35 * change[:4])
    # The pixel at (x, y) is taken from (a x + b y + e, c x + d y + f), about the middle, 3.5.
    e, f = 3.5 * (1.0 - a - b) + change[4], 3.5 * (1.0 - c - d) + change[5]
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None], transforms=[[a, b, e, c, d, f, 0.0, 0.0]], output_shape=[8, 8],
        fill_value=0.0, interpolation="BILINEAR",
    )  # fmt: skip
    return tf.ensure_shape((1.0 + 0.4 * change[6]) * moved[0], [8, 8, 1])


def create_dataset(global_batch_size, config, hparams):
    def two_views(example, seed):
        image, label = example
        return tf.stack([view(image, each) for each in tf.unstack(tf.random.split(seed, 2))]), label

    images, labels = load_digits("train")
    labels[hparams["labels"] :] = -1  # few labels are shown, and to the probes only
    examples = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000, config.seed)
    # A seed for each example: views are the same on any number of devices, and after a resume.
    return ctl.data.with_seeds(examples, config.seed).map(two_views).batch(global_batch_size)


def create_eval_dataset(global_batch_size):
    return tf.data.Dataset.from_tensor_slices(load_digits("test")).batch(global_batch_size)


# ---- Model: an encoder, which is what is wanted; a head that trains it, and the probes ----------
class SimCLR(keras.Model):
    def __init__(self, width):
        super().__init__()
        layers, conv = keras.layers, {"padding": "same", "activation": "silu"}
        self.encoder = keras.Sequential([
            keras.Input((8, 8, 1)), layers.Conv2D(width, 3, **conv),
            layers.Conv2D(2 * width, 3, 2, **conv), layers.Conv2D(4 * width, 3, 2, **conv),
            layers.Flatten(), layers.Dense(4 * width),
        ])  # fmt: skip
        self.head = keras.Sequential([
            keras.Input((4 * width,)), layers.Activation("silu"),
            layers.Dense(4 * width, "silu"), layers.Dense(width), layers.UnitNormalization(),
        ])  # fmt: skip
        self.probe_features, self.probe_pixels = (
            keras.Sequential([keras.Input((size,)), layers.LayerNormalization(), layers.Dense(10)])
            for size in (4 * width, 64)
        )

    def call(self, images):  # [b, 8, 8, 1], or views [b, 2, 8, 8, 1]; returns [b, views, ...]
        views = images.shape[1] if images.shape.rank == 5 else 1
        images = tf.reshape(images, [-1, 8, 8, 1])
        features = self.encoder(images)
        outputs = {
            "embedding": self.head(features),
            "features": self.probe_features(tf.stop_gradient(features)),
            "pixels": self.probe_pixels(tf.reshape(images, [-1, 64])),
        }
        return {name: tf.reshape(x, [-1, views, x.shape[-1]]) for name, x in outputs.items()}


def create_model(hparams):
    return SimCLR(hparams["width"])


def create_opt(lr):
    return keras.optimizers.Adam(lr)


# ---- Loss: each view has to find the other one of its image among all views of the batch --------
def loss_pre(output, batch, training, hparams):
    """Returns logits [b, views, n] and the index of the right one, [b, views].

    While training, n counts the views of the whole global batch, on all devices together, so that
    the negatives do not depend on the number of devices. The shares of the devices may differ by an
    image: ctl.row_offset() tells where this device's images are among those of all.

    In an evaluation, the logits are those of the probe of features, and the digit is right.
    """
    if not training:
        return output["features"], batch[1][:, None]
    mine = output["embedding"]  # [b, 2, width], of the images on this device
    everyone = tf.reshape(ctl.all_gather(mine), [-1, mine.shape[-1]])
    count = tf.shape(mine)[0]
    # This device's views among those of all, [b, 2]: each image has two, one after the other.
    itself = 2 * ctl.row_offset() + tf.reshape(tf.range(2 * count), [count, 2])
    logits = tf.tensordot(mine, everyone, [[2], [1]]) / hparams["temperature"]
    return logits - 1e9 * tf.one_hot(itself, tf.shape(everyone)[0]), tf.reverse(itself, [1])


def cross_entropy(loss_input):
    logits, right = loss_input
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(right, logits)
    return tf.reduce_mean(each, axis=1)  # one number per example


def create_loss():
    return cross_entropy


def grad_pre(loss, output, batch, train_model, hparams):
    labels = tf.tile(tf.nn.relu(batch[1])[:, None], [1, 2])
    probes = sum(cross_entropy((output[name], labels)) for name in PROBED)
    loss, probes = hparams["contrast"] * loss, tf.where(batch[1] >= 0, probes, 0.0)
    logged = {"contrastive": loss, "probes": probes}  # every log_every steps
    return loss + probes, 0.0, train_model.trainable_variables, logged


def create_metrics():
    return {f"accuracy_{name}": keras.metrics.SparseCategoricalAccuracy() for name in PROBED}


def metric_pre(output, batch):
    return {f"accuracy_{name}": (batch[1], output[name][:, 0]) for name in PROBED}


def after_eval(step, train_model, config, chief):
    """Draws ten held-out digits, and beside each the nine that the encoder finds most alike."""
    asked, known = load_digits("test")[0][:10], load_digits("train")[0]
    near, far = (tf.math.l2_normalize(train_model.encoder(x), axis=1) for x in (asked, known))
    found = tf.gather(known, tf.math.top_k(near @ tf.transpose(far), 9).indices)
    rows = tf.pad(tf.concat([asked[:, None], found], 1), [[0, 0], [0, 0], [1, 1], [1, 1], [0, 0]])
    sheet = tf.reshape(tf.transpose(rows, [0, 2, 1, 3, 4]), [1, 100, 100, 1])
    sheet = tf.image.resize(sheet, [300, 300], "nearest")
    tf.summary.image("neighbours", sheet)  # into the run's TensorBoard folder
    if chief:  # in a cluster this function runs in every process
        file = Path(config.runs_dir, config.run_name, "neighbours", f"{step:06d}.png")
        tf.io.write_file(str(file), tf.io.encode_png(tf.cast(255.0 * sheet[0], tf.uint8)))


def create_inference_model(model):
    """Returns what predict, load and export run: images in, features out."""
    return model.encoder
