"""EDIT THIS FILE: TensorFlow's tutorial on distributed custom training, written as hooks.

Training ends with the same weights as in the tutorial, from images of ten kinds of clothes:
https://www.tensorflow.org/tutorials/distribute/custom_training. The engine provides the loop,
which the tutorial writes itself.

    required:   create_dataset, create_model, create_loss
    used here:  create_eval_dataset, input_pre, create_opt, update_pre, create_metrics,
                create_train_metrics, train_metric_pre, every_steps

`python -m ctl_core hooks` lists all hooks, and `python -m ctl_core hooks update_pre` explains one.
After an edit, `./train.sh --check` tries every hook in about half a minute.
"""

import gzip

import keras
import numpy as np
import tensorflow as tf

# ---- Data ---------------------------------------------------------------------------------------

# The files of the data set's authors, and their checksums: a file that differs is rejected. They
# are downloaded once, to ~/.keras/datasets/fashion-mnist. Without a network, put them there.
URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
FOLDER = "datasets/fashion-mnist"
CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
IMAGE_HEADER = 16  # bytes before the pixels
LABEL_HEADER = 8  # bytes before the labels


def read_bytes(name, header):
    """Downloads a file if necessary, and returns its bytes without the header, uint8."""
    checksum = CHECKSUMS[name]
    path = keras.utils.get_file(name, URL + name, file_hash=checksum, cache_subdir=FOLDER)
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def load_clothes(split):
    """Returns the images, uint8 [n, 28, 28, 1], and the labels, int64 [n].

    Args:
        split: "train" or "t10k", which are the test images
    """
    images = read_bytes(f"{split}-images-idx3-ubyte.gz", IMAGE_HEADER)
    labels = read_bytes(f"{split}-labels-idx1-ubyte.gz", LABEL_HEADER)
    return images.reshape(-1, 28, 28, 1), labels.astype(np.int64)


def create_dataset(global_batch_size, config):
    """Shuffles all images in each pass, as the tutorial does.

    With `last_batch: keep` in config.yaml, the last 32 images of a pass are a smaller batch, as in
    the tutorial.
    """
    images, labels = load_clothes("train")
    images = tf.constant(images)
    labels = tf.constant(labels)

    # A checkpoint holds the shuffle's buffer, so that a resumed run continues with the next image.
    # Shuffling the numbers of the images, and not the images, keeps that buffer small.
    numbers = tf.data.Dataset.range(len(images)).shuffle(len(images), seed=config.seed)

    def look_up(number):
        return tf.gather(images, number), tf.gather(labels, number)

    return numbers.batch(global_batch_size).map(look_up)


def create_eval_dataset(global_batch_size):
    """Reads the test images once."""
    return tf.data.Dataset.from_tensor_slices(load_clothes("t10k")).batch(global_batch_size)


def input_pre(batch):
    """Scales the pixels. An exported model does so, too: clients send them as bytes."""
    images, _ = batch
    return tf.cast(images, tf.float32) / 255.0


# ---- Model and loss -----------------------------------------------------------------------------


def create_model(hparams):
    """Builds the network. The engine calls all create hooks in the strategy's scope."""
    l2 = keras.regularizers.L2(hparams["l2"])
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu", kernel_regularizer=l2),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu", kernel_regularizer=l2),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", kernel_regularizer=l2),
            keras.layers.Dense(10, kernel_regularizer=l2),
        ]
    )


def create_loss():
    """Returns the loss function, whose value is one number per example.

    There is no compute_average_loss, because the engine adds up the numbers of all devices and
    divides by the global batch size. There is no scale_regularization_loss either: by default,
    `grad_pre` adds the layers' L2 terms, once for any number of devices.
    """
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_loss(output_and_label):
        output, label = output_and_label
        return cross_entropy(label, output)

    return train_loss


# ---- The update ---------------------------------------------------------------------------------


def create_opt(lr):
    """Creates Adam, as in the tutorial. lr begins as learning_rate in config.yaml."""
    return keras.optimizers.Adam(lr)


def update_pre(gradients):
    """Applies the gradients, which are summed over all devices, without clipping them."""
    return gradients, gradients


# ---- Metrics ------------------------------------------------------------------------------------


def create_metrics():
    """Returns the metrics that an evaluation reports next to the loss."""
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


def create_train_metrics():
    """Returns metrics of the training examples since the last line, every `log_every` steps."""
    return {
        "mean_loss": keras.metrics.Mean(),
        "accuracy": keras.metrics.SparseCategoricalAccuracy(),
    }


def train_metric_pre(loss, output, batch):
    """Returns the arguments for each training metric."""
    _, labels = batch
    return {"mean_loss": loss, "accuracy": (labels, output)}


# Nothing runs on the host between steps, so that thousands of them are one call of the graph. The
# tutorial achieves this by iterating inside a tf.function.
every_steps = {}
