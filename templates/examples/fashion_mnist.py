"""Clothes of ten kinds: https://www.tensorflow.org/tutorials/distribute/custom_training without its
loop, with the same weights. All hooks and their defaults: `python -m ctl_core hooks`.
"""

import gzip

import keras
import numpy as np
import tensorflow as tf

# ---- Data ---------------------------------------------------------------------------------------

# As their authors publish them, with their checksums: another file is refused. Downloaded once, to
# ~/.keras/datasets/fashion-mnist; without a network, put them there yourself.
URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
FILES = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def load_numbers(name, header):
    """Returns what follows a file's header of so many bytes, uint8."""
    folder = "datasets/fashion-mnist"
    path = keras.utils.get_file(name, URL + name, file_hash=FILES[name], cache_subdir=folder)
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def load_clothes(part):
    """Returns the images of a part, uint8 [n, 28, 28, 1], and what they show, int64 [n]."""
    images = load_numbers(f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28, 1)
    return images, load_numbers(f"{part}-labels-idx1-ubyte.gz", 8).astype(np.int64)


def create_dataset(global_batch_size, config):
    """Shuffles all images in each pass, as the tutorial does."""
    # A checkpoint holds the shuffle's buffer, so that a resumed run continues with the next image.
    # Numbers of images take less space in it than images, which are looked up afterwards. With
    # `last_batch: keep` in config.yaml, the last 32 images of a pass are a batch, as there.
    images, labels = map(tf.constant, load_clothes("train"))
    numbers = tf.data.Dataset.range(len(images)).shuffle(len(images), seed=config.seed)
    batches = numbers.batch(global_batch_size)
    return batches.map(lambda number: (tf.gather(images, number), tf.gather(labels, number)))


def create_eval_dataset(global_batch_size):
    """Reads the test images once."""
    return tf.data.Dataset.from_tensor_slices(load_clothes("t10k")).batch(global_batch_size)


def input_pre(batch):
    """Scales the images. It is exported with the model: a client sends them as bytes."""
    images, _ = batch
    return tf.cast(images, tf.float32) / 255.0


# ---- Model and loss -----------------------------------------------------------------------------


def create_model(hparams):
    """Builds the model. The engine calls this, and all create hooks, in the strategy's scope."""
    layers = keras.layers
    l2 = {"kernel_regularizer": keras.regularizers.L2(hparams["l2"])}
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu", **l2),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu", **l2),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu", **l2),
            layers.Dense(10, **l2),
        ]
    )


def create_loss():
    """Returns the loss of each example, without dividing it."""
    # The engine does what compute_average_loss and scale_regularization_loss do in the tutorial:
    # the default of `grad_pre` returns the sum of the layers' L2 terms as a term that does not
    # depend on the batch, and that counts once on any number of devices.
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_loss(loss_input):
        logits, label = loss_input
        return cross_entropy(label, logits)

    return train_loss


# ---- The update ---------------------------------------------------------------------------------


def create_opt(lr):
    """Returns Adam, as in the tutorial. lr begins as learning_rate in config.yaml."""
    return keras.optimizers.Adam(lr)


def update_pre(gradients):
    """Applies the gradients, which are summed over all devices, as they are: no clipping."""
    return gradients, gradients


# ---- What is measured ---------------------------------------------------------------------------


def create_metrics():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


def create_train_metrics():
    """Returns metrics of the training examples since the last line (log_every)."""
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    return {"mean_loss": keras.metrics.Mean(), "accuracy": accuracy}


def train_metric_pre(loss, output, batch):
    return {"mean_loss": loss, "accuracy": (batch[1], output)}


# Nothing runs on the host between the steps: thousands of them are one call into the graph, which
# the tutorial gets by iterating inside a tf.function.
every_steps = {}
