"""SimCLR: what digits look like is learnt without labels, from two views of each image.

What `fit` cannot do, and these hooks show: a loss of each example against all others of the global
batch, whichever device they are on; random changes to images that a resumed run repeats; a linear
probe, trained beside, that says what the features are worth. After Chen and others (2020), "A
Simple Framework for Contrastive Learning". Other hooks: `python -m ctl_core hooks`.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from ctl_core.data import with_seeds

DIGITS = Path(__file__).parent / "data" / "digits.npz"


# ---- Data: two views of each image to train on, the image itself to evaluate --------------------
def load_digits(part):
    """Returns images, float32 [n, 8, 8, 1] from 0 to 1, and labels, int64 [n]."""
    with np.load(DIGITS) as file:
        rows = file[part]
        return file["images"][rows, :, :, None] / np.float32(16.0), file["labels"][rows].astype(int)


def view(image, seed):
    """Turns, scales, slants and moves an image, and makes it lighter or darker."""
    turn, slant, wide, high, right, down, light = tf.unstack(
        tf.random.stateless_uniform([7], seed, -1.0, 1.0)
    )
    cos, sin = tf.cos(0.4 * turn), tf.sin(0.4 * turn)
    a, b = (1.0 + 0.25 * wide) * cos, (1.0 + 0.25 * wide) * (0.3 * slant - sin)
    c, d = (1.0 + 0.25 * high) * sin, (1.0 + 0.25 * high) * cos
    # The pixel at (x, y) is taken from (a x + b y + e, c x + d y + f), counted from the corner.
    e, f = 3.5 * (1.0 - a - b) + right, 3.5 * (1.0 - c - d) + down
    changed = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None], transforms=[[a, b, e, c, d, f, 0.0, 0.0]], output_shape=[8, 8],
        fill_value=0.0, interpolation="BILINEAR",
    )  # fmt: skip
    return tf.ensure_shape(changed[0] * (1.0 + 0.4 * light), [8, 8, 1])


# A few labels are shown, to the probe only; the others are -1.
def create_dataset(per_replica_batch_size, config, hparams):
    def two_views(example, seed):
        image, label = example
        return tf.stack([view(image, each) for each in tf.unstack(tf.random.split(seed, 2))]), label

    images, labels = load_digits("train")
    labels[hparams["labels"] :] = -1
    examples = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000, config.seed)
    # with_seeds gives each example a seed by its number in the run: views are the same on any
    # number of devices, and after a resume.
    return with_seeds(examples, config.seed).map(two_views).batch(per_replica_batch_size)


def create_eval_dataset(per_replica_batch_size):
    return tf.data.Dataset.from_tensor_slices(load_digits("test")).batch(per_replica_batch_size)


# ---- Model: an encoder, which is what is wanted, and two heads that train and test it -----------
class SimCLR(keras.Model):
    def __init__(self, width):
        super().__init__()
        layers = keras.layers
        self.encoder = keras.Sequential([
            keras.Input((8, 8, 1)),
            layers.Conv2D(width, 3, padding="same", activation="silu"),
            layers.Conv2D(2 * width, 3, strides=2, padding="same", activation="silu"),
            layers.Conv2D(4 * width, 3, strides=2, padding="same", activation="silu"),
            layers.Flatten(), layers.Dense(4 * width),
        ])  # fmt: skip
        self.head = keras.Sequential([
            keras.Input((4 * width,)), layers.Activation("silu"),
            layers.Dense(4 * width, activation="silu"), layers.Dense(width), layers.UnitNormalization(),
        ])  # fmt: skip
        self.probe, self.pixels = (
            keras.Sequential([
                keras.Input((size,)), layers.LayerNormalization(center=False, scale=False),
                layers.Dense(10),
            ]) for size in (4 * width, 64)
        )  # fmt: skip

    def call(self, images):
        """Takes [b, 8, 8, 1], or views [b, 2, 8, 8, 1]; returns [b, views, ...] of each head."""
        each = tf.reshape(images, [-1, 8, 8, 1])
        features = self.encoder(each)
        outputs = {
            "embedding": self.head(features),
            "features": self.probe(tf.stop_gradient(features)),
            "pixels": self.pixels(tf.reshape(each, [-1, 64])),
        }
        views = images.shape[1] if images.shape.rank == 5 else 1
        return {name: tf.reshape(x, [-1, views, x.shape[-1]]) for name, x in outputs.items()}


def create_model(hparams):
    return SimCLR(hparams["width"])


# The probes have few labels, and learn faster. Pairs are groups: each variable is in one.
def create_opt(lr, train_model):
    learners, probes = train_model.layers[:2], train_model.layers[2:]
    return [
        (keras.optimizers.Adam(lr), [v for layer in learners for v in layer.trainable_variables]),
        (
            keras.optimizers.AdamW(lr, weight_decay=0.1),
            [v for layer in probes for v in layer.trainable_variables],
        ),
    ]


# ---- Loss: each view has to find the other one of its image among all views of the batch --------
def loss_pre(output, batch, training, hparams):
    """Returns logits [b, views, n] and which is right, [b, views]: in an evaluation, the digit."""
    if not training:
        return output["features"], batch[1][:, None]
    views = output["embedding"]
    # A device has b examples of the batch; these are the views of all of them, on every device.
    everyone = tf.reshape(ctl_core.all_gather(views), [-1, views.shape[-1]])
    count = tf.shape(views)[0]
    first = 2 * count * ctl_core.replica_id()  # where this device's begin among them
    itself = first + tf.reshape(tf.range(2 * count), [count, 2])
    logits = tf.tensordot(views, everyone, [[2], [1]]) / hparams["temperature"]
    return logits - 1e9 * tf.one_hot(itself, tf.shape(everyone)[0]), tf.reverse(itself, [1])


def cross_entropy(loss_input):
    logits, right = loss_input
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=right, logits=logits)
    return tf.reduce_mean(each, axis=1)  # one number per example


def create_loss():
    return cross_entropy


def grad_pre(loss, output, batch, train_model, hparams):
    labels = tf.tile(batch[1][:, None], [1, 2])
    probes = [cross_entropy((output[name], tf.nn.relu(labels))) for name in ("features", "pixels")]
    probe = tf.where(batch[1] >= 0, sum(probes), 0.0)  # relu: an index for the labels not shown
    # The dict is what is logged, every log_every steps.
    logged = {"contrastive": loss, "probe": probe}
    return hparams["contrast"] * loss + probe, 0.0, train_model.trainable_variables, logged


# ---- What has been learnt -----------------------------------------------------------------------
def create_metrics():
    names = ("features", "pixels")
    return {f"accuracy_{name}": keras.metrics.SparseCategoricalAccuracy() for name in names}


def metric_pre(output, batch):
    return {f"accuracy_{name}": (batch[1], output[name][:, 0]) for name in ("features", "pixels")}


def draw_neighbours(step, train_model, config, chief):
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


after_eval = draw_neighbours


# What predict, load and export run: images in, features out.
def create_inference_model(model):
    return model.encoder
