"""Images from TFRecord files, in three splits, with pictures of what goes wrong in TensorBoard.

It trains at once, on the digits in data/. For photos of your own, in folders by class such as
photos/cat/1.jpg, change three lines: where `write_tfrecords` reads and writes, the names of the
features to ("image", "label"), and `image_size=(160, 160)` for `read_tfrecords`.

A hook names only the arguments it uses. All hooks and their defaults: `python -m ctl_core hooks`.
"""

import keras
import tensorflow as tf

from ctl_core.data import project_file, read_tfrecords, write_tfrecords

CLASSES = 10

# ---- Data ---------------------------------------------------------------------------------------


# The files are written once, as by `python -m ctl_core tfrecords`, which shows every option. An
# example's split follows from a hash of its own values: it stays where it is whatever is added.
# A tenth is for choosing (when to stop, which checkpoint to keep), a tenth for the final word.
def read(split, **options):
    digits = project_file("data/digits.npz", __file__)
    records = write_tfrecords(
        digits,
        digits.parents[1] / "records" / "digits",
        drop=["train", "test"],  # the split that the file comes with
        validation=0.1,
        test=0.1,
    )
    return read_tfrecords(records, split, ("images", "labels"), **options)


# With a seed, the reader shuffles, begins again without end, and a checkpoint holds where it was.
def create_dataset(per_replica_batch_size, config):
    return read("train", batch_size=per_replica_batch_size, seed=config.seed)


# Several sets by name: their values are called validation/loss, test/accuracy and so on, which is
# what `keep_best` and `early_stop` in config.yaml go by.
def create_eval_dataset(per_replica_batch_size):
    return {
        split: read(split, batch_size=per_replica_batch_size) for split in ("validation", "test")
    }


def scaled(images):
    """Returns images from 0 to 1, float32 [n, 8, 8, 1], of uint8 [n, 8, 8] from 0 to 16."""
    return tf.cast(images, tf.float32)[..., None] / 16.0


# A part of what is exported, so that a client sends the bytes that the files hold.
def input_pre(batch):
    images, _ = batch
    return scaled(images)


# ---- Model, loss, metrics -----------------------------------------------------------------------


def create_model(hparams):
    width = hparams["width"]
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(width, 3, padding="same", activation="gelu"),
            keras.layers.Conv2D(2 * width, 3, padding="same", activation="gelu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def create_loss():
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_loss(loss_input):
        logits, label = loss_input
        return cross_entropy(label, logits)

    return train_loss


def create_metrics():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


# ---- Pictures in TensorBoard --------------------------------------------------------------------


def sheet(images, columns):
    """Returns images [n, height, width, channels] side by side, 4 times as large: one image."""
    rows = -(-len(images) // columns)
    images = tf.pad(images, [[0, rows * columns - len(images)], [1, 1], [1, 1], [0, 0]])
    _, height, width, channels = images.shape
    tiles = tf.reshape(images, [rows, columns, height, width, channels])
    whole = tf.reshape(
        tf.transpose(tiles, [0, 2, 1, 3, 4]), [rows * height, columns * width, channels]
    )
    return tf.repeat(tf.repeat(whole, 4, axis=0), 4, axis=1)


# Once, after the first step: what the model is really fed. In a cluster hooks run in every process;
# one of them draws. tf.summary writes to the run's folder, and knows the step.
def draw_batch(batch, chief):
    if chief:
        tf.summary.image("batch", sheet(scaled(batch[0]), 8)[None])


at_step = {1: draw_batch}


# After each evaluation: what is taken for what, and the images that are taken for something else,
# those it is surest of first. A label's row shows what it is taken for, from black to white; by the
# root of the share, so that one in a hundred shows, too. A good matrix is a white diagonal.
def after_eval(train_model, chief):
    if not chief:
        return
    images, labels = next(iter(read("validation", batch_size=1000)))
    chances = tf.nn.softmax(train_model(scaled(images)))
    taken = tf.argmax(chances, axis=1)
    counts = tf.math.confusion_matrix(labels, taken, CLASSES, dtype=tf.float32)
    shares = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, axis=1, keepdims=True))
    matrix = tf.repeat(tf.repeat(tf.sqrt(shares), 16, axis=0), 16, axis=1)
    tf.summary.image("confusion, labels downwards", matrix[None, :, :, None])
    wrong = tf.where(taken != tf.cast(labels, tf.int64))[:, 0]
    surest = tf.gather(wrong, tf.argsort(tf.gather(tf.reduce_max(chances, 1), wrong))[::-1])[:32]
    if len(surest):
        tf.summary.image(
            "mistaken, surest first", sheet(scaled(tf.gather(images, surest)), 8)[None]
        )
