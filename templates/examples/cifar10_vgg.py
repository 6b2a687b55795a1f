"""EDIT THIS FILE: a VGG-style network learns to classify the pictures of CIFAR-10.

It shows a layer of your own, momentum, weight decay of the kernels only, smoothed labels, and
augmentation: a resumed run changes the pictures in the same way as an uninterrupted run.

    required:   create_dataset, create_model, create_loss
    used here:  create_eval_dataset, input_pre, create_opt, create_metrics

`python -m ctl_core hooks` lists all hooks, and `python -m ctl_core hooks create_opt` explains one.
After an edit, `./train.sh --check` tries every hook in about half a minute.
"""

import functools
import tarfile

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl

# ---- Data ---------------------------------------------------------------------------------------

# The archive of the data set's authors, and its checksum: a file that differs is rejected. It is
# downloaded once, to ~/.keras/datasets/cifar-10. Without a network, put it there.
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
FILES = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["test_batch.bin"],
}

# Of red, green and blue in the training pictures.
MEAN = [125.3, 123.0, 113.9]
DEVIATION = [63.0, 62.1, 66.7]


@functools.cache
def load_pictures(split):
    """Returns the pictures, uint8 [n, 32, 32, 3], and the labels, int64 [n].

    Args:
        split: "train" or "test"
    """
    path = keras.utils.get_file(origin=URL, file_hash=SHA256, cache_subdir="datasets/cifar-10")
    content = b""
    with tarfile.open(path) as archive:
        for name in FILES[split]:
            file = archive.extractfile(f"cifar-10-batches-bin/{name}")
            assert file is not None, f"{name} is not a file"
            content += file.read()

    # A record is a label, and then all red, all green and all blue pixels.
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    labels = records[:, 0]
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    pictures = planes.transpose(0, 2, 3, 1)
    return tf.constant(pictures), tf.constant(labels, tf.int64)


def augment(picture, seed):
    """Shifts a picture by up to four pixels, and mirrors half of them.

    The changes are stateless: they follow from a seed, which depends on the place of the example in
    the run. So a resumed run sees the same pictures, on any number of devices.
    """
    padded = tf.pad(picture, [[4, 4], [4, 4], [0, 0]])
    shifted = tf.image.stateless_random_crop(padded, [32, 32, 3], seed)
    return tf.image.stateless_random_flip_left_right(shifted, seed + 1)


def create_dataset(global_batch_size, config):
    """Shuffles all pictures in each pass of 390 steps, without end.

    The shuffle is a function of the number of examples before. So a checkpoint holds that number,
    and no buffer of pictures.
    """
    pictures, labels = load_pictures("train")

    def augment_pair(picture_and_seed):
        picture, seed = picture_and_seed
        return augment(picture, seed)

    def look_up(numbers, seeds):
        pairs = (tf.gather(pictures, numbers), seeds)
        augmented = tf.map_fn(augment_pair, pairs, fn_output_signature=tf.uint8)
        return augmented, tf.gather(labels, numbers)

    shuffled = ctl.data.index_shuffle_with_seeds(len(pictures), global_batch_size, config.seed)
    return shuffled.map(look_up, tf.data.AUTOTUNE)


def create_eval_dataset(global_batch_size):
    """Reads the test pictures once."""
    return tf.data.Dataset.from_tensor_slices(load_pictures("test")).batch(global_batch_size)


def input_pre(batch):
    """Scales the pictures. An exported model does so, too: clients send them as bytes."""
    pictures, _ = batch
    return (tf.cast(pictures, tf.float32) - MEAN) / DEVIATION


# ---- Model --------------------------------------------------------------------------------------


class MixedPooling(keras.layers.Layer):
    """Halves height and width by a learned mixture of mean and maximum (Lee et al., 2016).

    A layer of your own need not be registered: a checkpoint holds its weights, and an exported
    model its computation, so that whoever loads the model needs none of this code.
    """

    def build(self, input_shape):
        self.mixture = self.add_weight(shape=(), initializer="zeros", name="mixture")

    def call(self, inputs):
        share = tf.sigmoid(self.mixture)
        maximum = tf.nn.max_pool2d(inputs, 2, 2, "VALID")
        mean = tf.nn.avg_pool2d(inputs, 2, 2, "VALID")
        return share * maximum + (1.0 - share) * mean


def create_model(hparams):
    """Builds six convolutions with batch normalization, in three blocks of two."""
    layers = [keras.Input((32, 32, 3))]
    for filters in (hparams["width"], 2 * hparams["width"], 4 * hparams["width"]):
        for _ in range(2):
            layers += [
                keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
                # Not synchronized, a device would use the mean of its own examples, so that the
                # result would depend on the number of devices.
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.ReLU(),
            ]
        layers.append(MixedPooling())
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    return keras.Sequential(layers)


# ---- Loss, optimizer, metrics -------------------------------------------------------------------


def create_loss(hparams):
    """Returns a loss function that smooths the labels in training, but not in an evaluation.

    The engine passes `training` to a loss function that declares it.
    """
    smoothed = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=hparams["smoothing"], reduction="none"
    )
    plain = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="none")

    def train_loss(output_and_label, training):
        output, label = output_and_label
        target = tf.one_hot(label, 10)
        if training:
            return smoothed(target, output)
        return plain(target, output)

    return train_loss


def create_opt(lr, train_model, hparams):
    """Creates an optimizer for each group of variables: only kernels decay. Both follow lr."""
    kernels = []
    others = []
    for variable in train_model.trainable_variables:
        group = kernels if variable.name == "kernel" else others
        group.append(variable)

    with_decay = keras.optimizers.SGD(
        lr, momentum=0.9, nesterov=True, weight_decay=hparams["decay"]
    )
    without_decay = keras.optimizers.SGD(lr, momentum=0.9, nesterov=True)
    return [(with_decay, kernels), (without_decay, others)]


def create_metrics():
    """Returns the metrics that an evaluation reports next to the loss."""
    return {
        "accuracy": keras.metrics.SparseCategoricalAccuracy(),
        "top_5": keras.metrics.SparseTopKCategoricalAccuracy(5),
    }
