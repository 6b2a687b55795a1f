"""CIFAR-10 by a VGG-style network: a layer of its own, augmentation, momentum, weight decay of
kernels only, smoothed labels. All hooks and their defaults: `python -m ctl_core hooks`.
"""

import functools
import tarfile

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl

# ---- Data ---------------------------------------------------------------------------------------

# As its authors publish it, with its checksum: another file is refused. Downloaded once, to
# ~/.keras/datasets/cifar-10; without a network, put it there yourself.
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
MEAN, DEVIATION = [125.3, 123.0, 113.9], [63.0, 62.1, 66.7]  # of red, green and blue in training


@functools.cache
def load_pictures(part):
    """Returns the pictures of train or test, uint8 [n, 32, 32, 3], and labels, int64 [n]."""
    names = ["test_batch"] if part == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    content = b""
    path = keras.utils.get_file(origin=URL, file_hash=SHA256, cache_subdir="datasets/cifar-10")
    with tarfile.open(path) as archive:
        for name in names:
            file = archive.extractfile(f"cifar-10-batches-bin/{name}.bin")
            assert file, f"{name}.bin is no file"
            content += file.read()
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    pictures = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return tf.constant(pictures), tf.constant(records[:, 0], tf.int64)


def augment(picture, seed):
    """Cuts out another part of a picture in each pass, mirrored or not."""
    # Stateless: the change follows from a seed, which depends on the example's place in the run. So
    # a resumed run sees the same pictures, on any number of devices.
    padded = tf.pad(picture, [[4, 4], [4, 4], [0, 0]])
    cut_out = tf.image.stateless_random_crop(padded, [32, 32, 3], seed)
    return tf.image.stateless_random_flip_left_right(cut_out, seed + 1)


def create_dataset(global_batch_size, config):
    """Shuffles all pictures anew in each pass, without end; 390 steps are a pass."""
    # Shuffled are the pictures' numbers, by a function of how many came before: a checkpoint holds
    # that count, and no buffer.
    pictures, labels = load_pictures("train")

    def look_up(numbers, seeds):
        pairs = (tf.gather(pictures, numbers), seeds)
        changed = tf.map_fn(lambda pair: augment(*pair), pairs, fn_output_signature=tf.uint8)
        return changed, tf.gather(labels, numbers)

    shuffled = ctl.data.index_shuffle_with_seeds(len(pictures), global_batch_size, config.seed)
    return shuffled.map(look_up, tf.data.AUTOTUNE)


def create_eval_dataset(global_batch_size):
    """Reads the test pictures once."""
    return tf.data.Dataset.from_tensor_slices(load_pictures("test")).batch(global_batch_size)


def input_pre(batch):
    """Scales the pictures. It is exported with the model: a client sends them as bytes."""
    pictures, _ = batch
    return (tf.cast(pictures, tf.float32) - MEAN) / DEVIATION


# ---- Model --------------------------------------------------------------------------------------


class MixedPooling(keras.layers.Layer):
    """Halves height and width by a learnt mixture of the mean and the maximum (Lee et al., 2016).

    A layer of your own has nothing to register: a checkpoint holds its weights, and an exported
    model its computation, so that whoever loads that needs none of this code.
    """

    def build(self, input_shape):
        self.mixture = self.add_weight(shape=(), initializer="zeros", name="mixture")

    def call(self, inputs):
        share = tf.sigmoid(self.mixture)
        highest = tf.nn.max_pool2d(inputs, 2, 2, "VALID")
        return share * highest + (1.0 - share) * tf.nn.avg_pool2d(inputs, 2, 2, "VALID")


def create_model(hparams):
    """Builds a VGG-like network with batch normalization and mixed pooling."""
    # Without synchronized=True, the mean in a batch normalization would be that of the replica's
    # own examples, and would depend on the number of devices.
    layers = [keras.Input((32, 32, 3))]
    for filters in (hparams["width"], 2 * hparams["width"], 4 * hparams["width"]):
        for _ in range(2):
            layers += [
                keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.ReLU(),
            ]
        layers.append(MixedPooling())
    return keras.Sequential(
        [*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    )


# ---- Loss, optimizer, metrics -------------------------------------------------------------------


def create_loss(hparams):
    """Returns a loss that trains on smoothed labels and evaluates on plain ones."""
    # The engine passes `training` to a loss that names it, and divides the sum over the examples
    # by the global batch size.
    options = {"from_logits": True, "reduction": "none"}
    smoothed = keras.losses.CategoricalCrossentropy(label_smoothing=hparams["smoothing"], **options)
    plain = keras.losses.CategoricalCrossentropy(**options)

    def train_loss(loss_input, training):
        logits, label = loss_input
        return (smoothed if training else plain)(tf.one_hot(label, 10), logits)

    return train_loss


def create_opt(lr, train_model, hparams):
    """Returns an optimizer for each group of variables: only kernels decay. Both follow lr."""
    kernels = [v for v in train_model.trainable_variables if v.name == "kernel"]
    others = [v for v in train_model.trainable_variables if v.name != "kernel"]
    momentum = {"momentum": 0.9, "nesterov": True}
    return [
        (keras.optimizers.SGD(lr, weight_decay=hparams["decay"], **momentum), kernels),
        (keras.optimizers.SGD(lr, **momentum), others),
    ]


def create_metrics():
    return {
        "accuracy": keras.metrics.SparseCategoricalAccuracy(),
        "top_5": keras.metrics.SparseTopKCategoricalAccuracy(5),
    }
