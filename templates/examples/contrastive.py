"""EDIT THIS FILE: an encoder learns what digits look like, without their labels (SimCLR).

The method is that of Chen et al., "A Simple Framework for Contrastive Learning of Visual
Representations", 2020. Two linear layers, called probes, show what the features are good for: they
learn to classify from few labels, one from the features and one from the pixels.

    required:   create_dataset, create_model, create_loss
    used here:  create_eval_dataset, create_opt, loss_pre, grad_pre, create_metrics, metric_pre,
                after_eval, create_inference_model

`python -m ctl_core hooks` lists all hooks, and `python -m ctl_core hooks grad_pre` explains one.
After an edit, `./train.sh --check` tries every hook in about half a minute.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl

DIGITS = Path(__file__).parent / "data/digits.npz"
PROBES = ("features", "pixels")  # what each probe classifies by
NO_LABEL = -1


# ---- Data: two views of each training image; the image itself in an evaluation ------------------


def load_digits(split):
    """Returns the images, float32 [n, 8, 8, 1] from 0 to 1, and the labels, int64 [n].

    Args:
        split: "train" or "test"
    """
    file = np.load(DIGITS)
    rows = file[split]
    images = file["images"][rows].astype("float32") / 16.0
    labels = file["labels"][rows].astype("int64")
    return images[..., np.newaxis], labels


def make_view(image, seed):
    """Returns an image that is turned, stretched, slanted, moved, and lighter or darker."""
    change = tf.random.stateless_uniform([7], seed, -1.0, 1.0)
    a, b, c, d = tf.unstack([1.0, 0.0, 0.0, 1.0] + 0.35 * change[:4])

    # The pixel at (x, y) is taken from (a x + b y + e, c x + d y + f). The center stays in place,
    # except for a shift of up to a pixel.
    center = 3.5
    e = center * (1.0 - a - b) + change[4]
    f = center * (1.0 - c - d) + change[5]
    transformed = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[tf.newaxis],
        transforms=[[a, b, e, c, d, f, 0.0, 0.0]],
        output_shape=[8, 8],
        fill_value=0.0,
        interpolation="BILINEAR",
    )
    brightness = 1.0 + 0.4 * change[6]
    return tf.ensure_shape(brightness * transformed[0], [8, 8, 1])


def make_two_views(example, seed):
    """Returns two views of an image, [2, 8, 8, 1], and its label."""
    image, label = example
    seeds = tf.unstack(tf.random.split(seed, 2))
    return tf.stack([make_view(image, view_seed) for view_seed in seeds]), label


def create_dataset(global_batch_size, config, hparams):
    """Returns pairs of views. Only the first few images have labels, which only the probes see."""
    images, labels = load_digits("train")
    labels[hparams["labels"] :] = NO_LABEL
    examples = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000, config.seed)
    # A seed for each example: views are the same on any number of devices, and after a resume.
    seeded = ctl.data.with_seeds(examples, config.seed)
    return seeded.map(make_two_views).batch(global_batch_size)


def create_eval_dataset(global_batch_size):
    """Reads the test images once."""
    return tf.data.Dataset.from_tensor_slices(load_digits("test")).batch(global_batch_size)


# ---- Model: the encoder, the head that trains it, and the probes --------------------------------


def make_probe(size):
    """Returns a linear classifier of vectors of a size."""
    return keras.Sequential(
        [keras.Input((size,)), keras.layers.LayerNormalization(), keras.layers.Dense(10)]
    )


class SimCLR(keras.Model):
    """The encoder with all that is needed to train and to judge it."""

    def __init__(self, width):
        super().__init__()
        self.encoder = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(width, 3, padding="same", activation="silu"),
                keras.layers.Conv2D(2 * width, 3, strides=2, padding="same", activation="silu"),
                keras.layers.Conv2D(4 * width, 3, strides=2, padding="same", activation="silu"),
                keras.layers.Flatten(),
                keras.layers.Dense(4 * width),
            ]
        )
        self.head = keras.Sequential(
            [
                keras.Input((4 * width,)),
                keras.layers.Activation("silu"),
                keras.layers.Dense(4 * width, activation="silu"),
                keras.layers.Dense(width),
                keras.layers.UnitNormalization(),
            ]
        )
        self.probe_features = make_probe(4 * width)
        self.probe_pixels = make_probe(64)

    def call(self, images):
        """Returns a dict of tensors [b, views, ...].

        Args:
            images: [b, 8, 8, 1] in an evaluation, or [b, 2, 8, 8, 1], two views of each image
        """
        views = 1
        if images.shape.rank == 5:
            views = images.shape[1]
        images = tf.reshape(images, [-1, 8, 8, 1])
        features = self.encoder(images)
        outputs = {
            "embedding": self.head(features),
            # The probes train themselves, but not the encoder.
            "features": self.probe_features(tf.stop_gradient(features)),
            "pixels": self.probe_pixels(tf.reshape(images, [-1, 64])),
        }
        return {
            name: tf.reshape(output, [-1, views, output.shape[-1]])
            for name, output in outputs.items()
        }


def create_model(hparams):
    """Builds the encoder, the head and the probes."""
    return SimCLR(hparams["width"])


def create_opt(lr):
    """Creates the optimizer."""
    return keras.optimizers.Adam(lr)


# ---- Loss: each view has to find the other view of its image among all views of the batch -------


def loss_pre(output, batch, training, hparams):
    """Returns logits [b, views, n] and the index of the right one, [b, views].

    In training, n is the number of views in the whole global batch, on all devices together, so
    that the negatives do not depend on the number of devices. In an evaluation, the logits are
    those of the probe of the features, and the label is right.
    """
    if not training:
        _, labels = batch
        return output["features"], labels[:, tf.newaxis]

    local = output["embedding"]  # [b, 2, width], the views on this device
    count = tf.shape(local)[0]
    everyone = tf.reshape(ctl.all_gather(local), [-1, local.shape[-1]])

    # The places of this device's views among all, [b, 2]: each image has two, one after the other.
    # Devices may have different numbers of images; ctl.row_offset() counts those before this one's.
    place = 2 * ctl.row_offset() + tf.reshape(tf.range(2 * count), [count, 2])
    similarity = tf.tensordot(local, everyone, [[2], [1]]) / hparams["temperature"]
    without_itself = similarity - 1e9 * tf.one_hot(place, tf.shape(everyone)[0])
    other_view = tf.reverse(place, [1])
    return without_itself, other_view


def cross_entropy(logits_and_index):
    """Returns the mean over the views of each image: one number per example."""
    logits, index = logits_and_index
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(index, logits)
    return tf.reduce_mean(losses, axis=1)


def create_loss():
    """Returns the loss function, which is called with what loss_pre returns."""
    return cross_entropy


def grad_pre(loss, output, batch, train_model, hparams):
    """Adds the losses of the probes, for the images that have a label.

    The values in the dict are averaged and logged every `log_every` steps.
    """
    _, labels = batch
    shown = tf.tile(tf.nn.relu(labels)[:, tf.newaxis], [1, 2])
    probe_loss = sum(cross_entropy((output[name], shown)) for name in PROBES)
    probe_loss = tf.where(labels == NO_LABEL, 0.0, probe_loss)
    contrastive_loss = hparams["contrast"] * loss
    logged = {"contrastive": contrastive_loss, "probes": probe_loss}
    return contrastive_loss + probe_loss, 0.0, train_model.trainable_variables, logged


# ---- Results: the accuracy of the probes, similar images, and the encoder -----------------------


def create_metrics():
    """Returns the accuracy of each probe."""
    return {f"accuracy_{name}": keras.metrics.SparseCategoricalAccuracy() for name in PROBES}


def metric_pre(output, batch):
    """Returns the arguments for each metric."""
    _, labels = batch
    return {f"accuracy_{name}": (labels, output[name][:, 0]) for name in PROBES}


def after_eval(step, train_model, config, chief):
    """Draws ten test images, and next to each the nine that the encoder finds most similar."""
    test_images, _ = load_digits("test")
    queries = test_images[:10]
    images, _ = load_digits("train")
    query_features = tf.math.l2_normalize(train_model.encoder(queries), axis=1)
    image_features = tf.math.l2_normalize(train_model.encoder(images), axis=1)
    similarity = query_features @ tf.transpose(image_features)
    nearest = tf.gather(images, tf.math.top_k(similarity, 9).indices)

    # Ten rows of ten images, each with a black border.
    rows = tf.concat([queries[:, tf.newaxis], nearest], axis=1)
    tiles = tf.pad(rows, [[0, 0], [0, 0], [1, 1], [1, 1], [0, 0]])
    sheet = tf.reshape(tf.transpose(tiles, [0, 2, 1, 3, 4]), [1, 100, 100, 1])
    sheet = tf.image.resize(sheet, [300, 300], "nearest")
    tf.summary.image("neighbors", sheet)  # into the run's TensorBoard folder
    if chief:  # in a cluster, this function runs in every process
        path = Path(config.runs_dir, config.run_name, "neighbors", f"{step:06d}.png")
        tf.io.write_file(str(path), tf.io.encode_png(tf.cast(255.0 * sheet[0], tf.uint8)))


def create_inference_model(model):
    """Returns what predict, load and export run: images in, features out."""
    return model.encoder
