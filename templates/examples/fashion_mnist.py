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


# The tutorial shuffles all images in a buffer. A checkpoint holds such a buffer, so that a resumed
# run goes on with the next image: shuffled here are the images' numbers, which take less of it, and
# the images are looked up after that. `last_batch: keep` in config.yaml makes the last 32 images of
# a pass a batch of their own, as in the tutorial.
def create_dataset(global_batch_size, config):
    images, labels = map(tf.constant, load_clothes("train"))
    numbers = tf.data.Dataset.range(len(images)).shuffle(len(images), seed=config.seed)
    batches = numbers.batch(global_batch_size)
    return batches.map(lambda number: (tf.gather(images, number), tf.gather(labels, number)))


def create_eval_dataset(global_batch_size):
    return tf.data.Dataset.from_tensor_slices(load_clothes("t10k")).batch(global_batch_size)


# What comes before the model comes before an exported model, too: whoever uses it sends bytes, and
# need not know how they were scaled.
def input_pre(batch):
    images, _ = batch
    return tf.cast(images, tf.float32) / 255.0


# ---- Model and loss -----------------------------------------------------------------------------


# Made under the strategy's scope, as optimizer, loss and metrics are: the engine sees to that.
def create_model(hparams):
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


# One number per example, and no division: the tutorial's compute_average_loss is the engine's part.
# So is its scale_regularization_loss. The default of `grad_pre` returns what the layers' L2 adds up
# to as a term that does not depend on the batch, and that counts once however many devices there
# are.
def create_loss():
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_loss(loss_input):
        logits, label = loss_input
        return cross_entropy(label, logits)

    return train_loss


# ---- The update ---------------------------------------------------------------------------------


# The default is Nadam; the tutorial has Adam. lr begins as learning_rate in config.yaml.
def create_opt(lr):
    return keras.optimizers.Adam(lr)


# What is applied, and what hooks may look at. The default clips what is too large; the tutorial
# does not. The gradients have been summed over all devices by now.
def update_pre(gradients):
    return gradients, gradients


# ---- What is measured ---------------------------------------------------------------------------


def create_metrics():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


# The same in training, over all examples since the last line: every log_every steps, a pass here.
def create_train_metrics():
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    return {"mean_loss": keras.metrics.Mean(), "accuracy": accuracy}


def train_metric_pre(loss, output, batch):
    return {"mean_loss": loss, "accuracy": (batch[1], output)}


# Nothing runs on the host between the steps: thousands of them are one call into the graph, which
# the tutorial gets by iterating inside a tf.function.
every_steps = {}
