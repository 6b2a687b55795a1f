"""Images in TFRecord files. For photos: `python make_records.py photos records/photos`, then change
RECORDS, SIZE, CHANNELS, CLASSES. All hooks and their defaults: `python -m ctl_core hooks`.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl
from make_records import write_records

PROJECT = Path(__file__).parent
RECORDS = PROJECT / "records/digits"
SIZE, CHANNELS, CLASSES = (8, 8), 1, 10

# ---- Data ---------------------------------------------------------------------------------------


def digits():
    """Yields key and features of each, for make_records.py, as it makes them of image files."""
    with np.load(PROJECT / "data/digits.npz") as file:
        for number, (image, label) in enumerate(zip(file["images"], file["labels"], strict=True)):
            content = tf.io.encode_png(15 * image[..., None]).numpy()
            yield str(number), {"image": content, "label": int(label)}


# A tenth is for choosing (when to stop, which checkpoint to keep), a tenth for the final word.
def files(split):
    """Returns the paths of a split's files, which are written when first asked for."""
    if not RECORDS.exists():
        write_records(digits(), RECORDS)
    return sorted(str(path) for path in RECORDS.glob(f"{split}-*.tfrecord"))


def parse(example):
    """Returns image, uint8 of SIZE and CHANNELS, and label, int64, of what a file holds."""
    features = {"image": tf.io.FixedLenFeature([], tf.string)}
    features["label"] = tf.io.FixedLenFeature([], tf.int64)
    found = tf.io.parse_single_example(example, features)
    image = tf.io.decode_image(found["image"], CHANNELS, expand_animations=False)
    return tf.saturate_cast(tf.image.resize(image, SIZE), tf.uint8), found["label"]


# Another shift in each pass: digits that are mirrored would be others. Stateless: how an image is
# changed follows from its seed, on any number of devices and after a resume.
def parse_and_shift(example, seed):
    image, label = parse(example)
    padded = tf.pad(image, [[1, 1], [1, 1], [0, 0]])
    return tf.image.stateless_random_crop(padded, [*SIZE, CHANNELS], seed), label


# All files are read side by side. The buffer of the shuffle is part of a checkpoint, so that a
# resumed run goes on with the very next example: 1000 images as the files have them, half a
# megabyte here. `with_seeds` goes from pass to pass without end: a run is measured in steps.
def create_dataset(global_batch_size, config):
    paths = files("train")
    read, parallel = tf.data.TFRecordDataset, tf.data.AUTOTUNE
    examples = tf.data.Dataset.from_tensor_slices(paths).interleave(read, len(paths), 1, parallel)
    seeded = ctl.data.with_seeds(examples.shuffle(1000, config.seed), config.seed)
    return seeded.map(parse_and_shift, parallel).batch(global_batch_size)


def read_once(split, batch_size):
    return tf.data.TFRecordDataset(files(split)).map(parse).batch(batch_size)


# Several sets by name: their values are called validation/loss, test/accuracy and so on, which is
# what `keep_best` and `early_stop` in config.yaml go by.
def create_eval_dataset(global_batch_size):
    return {split: read_once(split, global_batch_size) for split in ("validation", "test")}


# A part of what is exported, so that a client sends pixels as they are, uint8.
def input_pre(batch):
    images, _ = batch
    return tf.cast(images, tf.float32) / 255.0


# ---- Model, loss, metrics -----------------------------------------------------------------------


def create_model(hparams):
    layers, width, conv = keras.layers, hparams["width"], {"padding": "same", "activation": "gelu"}
    return keras.Sequential([
        keras.Input((*SIZE, CHANNELS)), layers.Conv2D(width, 3, **conv),
        layers.Conv2D(2 * width, 3, **conv), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(CLASSES),
    ])  # fmt: skip


def create_loss():
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_loss(loss_input):
        logits, label = loss_input
        return cross_entropy(label, logits)

    return train_loss


def create_metrics():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


# ---- Pictures in TensorBoard --------------------------------------------------------------------


def enlarged(image, times):
    return tf.repeat(tf.repeat(image, times, axis=0), times, axis=1)[None]


def sheet(images):
    """Returns images [n, height, width, channels] in rows of eight as one, 4 times as large."""
    tiles = tf.unstack(tf.pad(images, [[0, -len(images) % 8], [1, 1], [1, 1], [0, 0]]))
    rows = [tf.concat(tiles[start : start + 8], axis=1) for start in range(0, len(tiles), 8)]
    return enlarged(tf.concat(rows, axis=0), 4)


# Once, after the first step: what the model is really fed. In a cluster hooks run in every process;
# one of them draws. tf.summary writes to the run's folder, and knows the step.
def draw_batch(batch, chief):
    if chief:
        tf.summary.image("batch", sheet(batch[0]))


at_step = {1: draw_batch}


# After each evaluation: what is taken for what, and the images that are taken for something else,
# those it is surest of first. A label's row shows what it is taken for, from black to white; by the
# root of the share, so that one in a hundred shows, too. A good matrix is a white diagonal.
def after_eval(train_model, chief):
    if not chief:
        return
    images, labels = next(iter(read_once("validation", 1000)))
    chances = tf.nn.softmax(train_model(input_pre((images, labels))))
    taken = tf.argmax(chances, axis=1)
    counts = tf.math.confusion_matrix(labels, taken, CLASSES, dtype=tf.float32)
    shares = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, axis=1, keepdims=True))
    tf.summary.image("confusion, labels downwards", enlarged(tf.sqrt(shares)[..., None], 16))
    wrong = tf.where(taken != labels)[:, 0]
    surest = tf.gather(wrong, tf.argsort(tf.gather(tf.reduce_max(chances, 1), wrong))[::-1])[:32]
    if len(surest):
        tf.summary.image("mistaken, surest first", sheet(tf.gather(images, surest)))
