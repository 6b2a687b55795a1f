"""EDIT THIS FILE: a small network learns from images in TFRecord files.

At first, the images are handwritten digits. For your own photos, run `python make_records.py photos
records/photos`, then change RECORDS, SIZE, CHANNELS and CLASSES below.

    required:   create_dataset, create_model, create_loss
    used here:  create_eval_dataset, input_pre, create_metrics, at_step, after_eval

`python -m ctl_core hooks` lists all hooks, and `python -m ctl_core hooks after_eval` explains one.
After an edit, `./train.sh --check` tries every hook in about half a minute.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl
from make_records import write_records

PROJECT = Path(__file__).parent
RECORDS = PROJECT / "records/digits"
SIZE = (8, 8)
CHANNELS = 1
CLASSES = 10

# ---- Data ---------------------------------------------------------------------------------------


def read_digits():
    """Yields the key and the features of each digit, for make_records.py."""
    with np.load(PROJECT / "data/digits.npz") as file:
        images = file["images"]
        labels = file["labels"]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        content = tf.io.encode_png(15 * image[..., np.newaxis]).numpy()
        yield str(number), {"image": content, "label": int(label)}


def list_files(split):
    """Returns the paths of a split's files. The digits are written when first asked for.

    Use "validation" for decisions, such as when to stop, and "test" for the final result.
    """
    if not RECORDS.exists():
        write_records(read_digits(), RECORDS)
    return sorted(str(path) for path in RECORDS.glob(f"{split}-*.tfrecord"))


def parse(record):
    """Returns the image, uint8 of SIZE and CHANNELS, and the label, int64, of a record."""
    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    example = tf.io.parse_single_example(record, features)
    image = tf.io.decode_image(example["image"], CHANNELS, expand_animations=False)
    resized = tf.image.resize(image, SIZE)
    return tf.saturate_cast(resized, tf.uint8), example["label"]


def parse_and_shift(record, seed):
    """Shifts an image by up to a pixel, differently in each pass.

    The shift is stateless: it follows from the seed, on any number of devices and after a resume.
    There is no mirroring, because a mirrored digit is no digit.
    """
    image, label = parse(record)
    padded = tf.pad(image, [[1, 1], [1, 1], [0, 0]])
    shifted = tf.image.stateless_random_crop(padded, [*SIZE, CHANNELS], seed)
    return shifted, label


def create_dataset(global_batch_size, config):
    """Reads all files in parallel, without end.

    In a cluster, every process reads all records, but decodes only its own rows of each batch. A
    checkpoint of a single process holds the shuffle's buffer, so that a resumed run continues with
    the next example. The buffer has 1000 images as they are in the files, here half a megabyte.
    """
    paths = list_files("train")
    records = tf.data.Dataset.from_tensor_slices(paths).interleave(
        tf.data.TFRecordDataset,
        cycle_length=len(paths),
        block_length=1,
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    shuffled = records.shuffle(1000, config.seed)
    seeded = ctl.data.with_seeds(shuffled, config.seed)
    rows = ctl.data.own_rows(seeded)
    return rows.map(parse_and_shift, tf.data.AUTOTUNE).batch(global_batch_size)


def read_once(split, batch_size):
    """Returns the batches of one pass over a split."""
    records = ctl.data.own_rows(tf.data.TFRecordDataset(list_files(split)))
    return records.map(parse).batch(batch_size)


def create_eval_dataset(global_batch_size):
    """Returns two datasets by name.

    Their values are called validation/loss, test/accuracy and so on; `keep_best` and `early_stop`
    in config.yaml use such names.
    """
    return {
        "validation": read_once("validation", global_batch_size),
        "test": read_once("test", global_batch_size),
    }


def input_pre(batch):
    """Scales the pixels. An exported model does so, too: clients send them as bytes."""
    images, _ = batch
    return tf.cast(images, tf.float32) / 255.0


# ---- Model, loss, metrics -----------------------------------------------------------------------


def create_model(hparams):
    """Builds the network. The width is a setting of this project: see hparams in config.yaml."""
    width = hparams["width"]
    return keras.Sequential(
        [
            keras.Input((*SIZE, CHANNELS)),
            keras.layers.Conv2D(width, 3, padding="same", activation="gelu"),
            keras.layers.Conv2D(2 * width, 3, padding="same", activation="gelu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def create_loss():
    """Returns the loss function, whose value is one number per example, never a mean."""
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_loss(output_and_label):
        output, label = output_and_label
        return cross_entropy(label, output)

    return train_loss


def create_metrics():
    """Returns the metrics that an evaluation reports next to the loss."""
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


# ---- Pictures in TensorBoard --------------------------------------------------------------------
# In a cluster, these hooks run in every process, and only the chief draws. tf.summary writes to the
# folder of the run, and knows the step.


def enlarge(image, times):
    """Returns an image as a batch of one, in which each pixel is a square."""
    wide = tf.repeat(image, times, axis=1)
    return tf.repeat(wide, times, axis=0)[tf.newaxis]


def arrange(images):
    """Returns images [n, height, width, channels] as one picture with rows of eight."""
    missing = -len(images) % 8
    tiles = tf.unstack(tf.pad(images, [[0, missing], [1, 1], [1, 1], [0, 0]]))
    rows = [tf.concat(tiles[start : start + 8], axis=1) for start in range(0, len(tiles), 8)]
    return enlarge(tf.concat(rows, axis=0), 4)


def draw_batch(batch, chief):
    """Draws the images of the first batch, as the model sees them."""
    if chief:
        images, _ = batch
        tf.summary.image("batch", arrange(images))


at_step = {1: draw_batch}


def after_eval(train_model, chief):
    """Draws a confusion matrix, and the misclassified images, the most confident ones first."""
    if not chief:
        return
    images, labels = next(iter(read_once("validation", 1000)))
    probabilities = tf.nn.softmax(train_model(input_pre((images, labels))))
    predictions = tf.argmax(probabilities, axis=1)

    # Row: the label; column: the prediction. White is 1. The square root makes an error of one in a
    # hundred visible. A good matrix is a white diagonal.
    counts = tf.math.confusion_matrix(labels, predictions, CLASSES, dtype=tf.float32)
    shares = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, axis=1, keepdims=True))
    brightness = tf.sqrt(shares)[..., tf.newaxis]
    tf.summary.image("confusion, labels downwards", enlarge(brightness, 16))

    wrong = tf.where(predictions != labels)[:, 0]
    if len(wrong):
        confidence = tf.gather(tf.reduce_max(probabilities, axis=1), wrong)
        order = tf.argsort(confidence, direction="DESCENDING")[:32]
        tf.summary.image("misclassified", arrange(tf.gather(images, tf.gather(wrong, order))))
