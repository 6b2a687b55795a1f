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


def parse_and_shift(example, seed):
    """Shifts an image, differently in each pass; a mirrored digit would be another one."""
    # Stateless: the shift follows from the seed, on any number of devices and after a resume.
    image, label = parse(example)
    padded = tf.pad(image, [[1, 1], [1, 1], [0, 0]])
    return tf.image.stateless_random_crop(padded, [*SIZE, CHANNELS], seed), label


def create_dataset(global_batch_size, config):
    """Reads all files side by side, without end: a run is measured in steps."""
    # The shuffle's buffer is part of a checkpoint, so that a resumed run continues with the next
    # example: 1000 images as they are in the files, half a megabyte here.
    paths = files("train")
    read, parallel = tf.data.TFRecordDataset, tf.data.AUTOTUNE
    examples = tf.data.Dataset.from_tensor_slices(paths).interleave(read, len(paths), 1, parallel)
    seeded = ctl.data.with_seeds(examples.shuffle(1000, config.seed), config.seed)
    return seeded.map(parse_and_shift, parallel).batch(global_batch_size)


def read_once(split, batch_size):
    return tf.data.TFRecordDataset(files(split)).map(parse).batch(batch_size)


def create_eval_dataset(global_batch_size):
    """Returns two sets by name."""
    # Their values are called validation/loss, test/accuracy and so on. `keep_best` and `early_stop`
    # in config.yaml name one of these.
    return {split: read_once(split, global_batch_size) for split in ("validation", "test")}


def input_pre(batch):
    """Scales the images. It is exported with the model: a client sends pixels as uint8."""
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


def draw_batch(batch, chief):
    """Draws, after the first step, the images that the model is trained on."""
    # In a cluster, hooks run in every process, and one of them draws. tf.summary writes to the
    # folder of the run, and knows the step.
    if chief:
        tf.summary.image("batch", sheet(batch[0]))


at_step = {1: draw_batch}


def after_eval(train_model, chief):
    """Draws a confusion matrix and the misclassified images, those with most confidence first."""
    # The row of a label shows its predictions from black to white; by the root of the share, so
    # that one in a hundred is visible. A good matrix is a white diagonal.
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
