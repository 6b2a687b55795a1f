"""EDIT THIS FILE: a small convolutional network learns to read handwritten digits.

The engine calls these functions, the *hooks*, by name, and passes the arguments that they declare.

    required:   create_dataset, create_model, create_loss
    used here:  create_eval_dataset, create_metrics
    optional:   create_opt          the optimizer
                input_pre           the model's input, built from a batch
                grad_pre            more terms of the loss
                update_pre          what is done to the gradients, such as clipping
                every_steps         your own functions, called every so many steps
                and more: `python -m ctl_core hooks` lists all of them

`python -m ctl_core hooks update_pre` explains a hook: its arguments, its default, an example. After
an edit, `./train.sh --check` tries every hook in about half a minute.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

DIGITS = Path(__file__).parent / "data/digits.npz"


def load_digits(split):
    """Returns the images, float32 [n, 8, 8, 1] from 0 to 1, and the labels, int64 [n].

    Args:
        split: "train" or "test"
    """
    file = np.load(DIGITS)
    rows = file[split]
    images = file["images"][rows].astype("float32") / 16
    labels = file["labels"][rows].astype("int64")
    return images[..., np.newaxis], labels


def create_dataset(global_batch_size, config):
    """Reads the training data once; the engine repeats it.

    For random augmentation that a resumed run repeats, see ctl_core.data.with_seeds.
    """
    examples = tf.data.Dataset.from_tensor_slices(load_digits("train"))
    shuffled = examples.shuffle(len(examples), seed=config.seed)
    return shuffled.batch(global_batch_size, drop_remainder=True)


def create_eval_dataset(global_batch_size):
    """Reads the test data once. An evaluation counts every example exactly once."""
    examples = tf.data.Dataset.from_tensor_slices(load_digits("test"))
    return examples.batch(global_batch_size)


def create_model(hparams):
    """Builds the network. The width is a setting of this project: see hparams in config.yaml."""
    width = hparams["width"]
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(width, 3, padding="same", activation="gelu"),
            keras.layers.Conv2D(2 * width, 3, padding="same", activation="gelu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def create_loss():
    """Returns the loss function, whose value is one number per example, never a mean.

    The engine adds up the numbers of all devices and divides by the global batch size.
    """
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_loss(output_and_label):
        output, label = output_and_label
        return cross_entropy(label, output)

    return train_loss


def create_metrics():
    """Returns the metrics that an evaluation reports next to the loss."""
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
