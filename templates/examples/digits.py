"""Digits told apart by a small network: the file to edit. A hook is a function by its name,
and names only the arguments that it uses; `python -m ctl_core hooks` lists hooks and arguments.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl

DIGITS = Path(__file__).parent / "data/digits.npz"


def load_digits(part):
    """Returns images, float32 [n, 8, 8, 1] from 0 to 1, and labels, int64 [n]."""
    file = np.load(DIGITS)
    images = file["images"][file[part], ..., None] / np.float32(16)
    return images, file["labels"][file[part]]


def create_dataset(global_batch_size, config):
    """Reads the training data once; the engine repeats it."""
    # Random changes of examples: see ctl.data.with_seeds.
    examples = tf.data.Dataset.from_tensor_slices(load_digits("train"))
    shuffled = examples.shuffle(len(examples), seed=config.seed)
    return shuffled.batch(global_batch_size, drop_remainder=True)


def create_eval_dataset(global_batch_size):
    """Reads the evaluation data once."""
    return tf.data.Dataset.from_tensor_slices(load_digits("test")).batch(global_batch_size)


def create_model(hparams):
    """Builds the model. Settings of your own, such as width, are hparams in config.yaml."""
    width = hparams["width"]
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(width, 3, padding="same", activation="gelu"),
        keras.layers.Conv2D(2 * width, 3, padding="same", activation="gelu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
    return keras.Sequential(layers)


def create_loss():
    """Returns the loss: one number per example, never a mean."""
    # The engine divides their sum by the global batch size.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda pair: loss(pair[1], pair[0])  # pair: output and target


def create_metrics():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


# ---- Below stand the defaults: change them, or delete them, which changes nothing ---------------


def make_batches(dataset):
    """Makes a last change to the repeated dataset, before the replicas get their shares."""
    return dataset


def count_examples(batch):
    """Counts the examples of a batch. In graphs or point sets: tf.shape(labels)[0]."""
    return ctl.leading_dimension(batch)


def create_opt(lr):
    """Creates the optimizer. SGD(lr * 0.1) works, too, and host hooks may call lr.assign(0.01)."""
    return keras.optimizers.Nadam(learning_rate=lr, epsilon=0.001)


def create_ckpt(ckpt_path, step, lr, optimizer, train_model, train_loss, config):
    """Says what a checkpoint holds, and how many checkpoints are kept."""
    ckpt = tf.train.Checkpoint(
        step=step, lr=lr, optimizer=optimizer, train_model=train_model, train_loss=train_loss
    )
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=config.keep)


def input_pre(batch):
    """Returns the model's input, from a batch (inputs, targets) or (inputs, targets, weights)."""
    inputs, _, _ = ctl.unpack(batch)
    return inputs


def loss_pre(output, batch):
    """Returns the argument of train_loss."""
    _, target, _ = ctl.unpack(batch)
    return output, target


# By default the sum of the losses is divided by the number of examples. Per token it would be:
#
# def batch_weight(batch):
#     """Returns what the sum of the losses is divided by."""
#     return tf.reduce_sum(batch["mask"])


def grad_pre(loss, batch, train_model):
    """Returns the loss of each example, terms that do not depend on the batch, and variables."""
    return (
        ctl.weighted(loss, batch),
        ctl.regularization(train_model),
        ctl.trainable_variables(train_model),
    )


def update_pre(gradients):
    """Returns the gradients to apply and those to display; they are summed over all replicas."""
    gradients = [ctl.nan_to_zero(gradient) for gradient in gradients]
    clipped, _ = tf.clip_by_global_norm(gradients, 10.0)
    return clipped, gradients


@ctl.deferred
def print_step(step):
    """Shows the step. Deferred: it only looks on, and so the engine does not leave the graph."""
    ctl.show_step(step)


def print_loss(step, loss):
    """Prints the loss, and writes it to TensorBoard and metrics.jsonl."""
    ctl.report(step, loss=loss)


# {N: function or list of functions}: after every N-th step, and once after step N, on the host and
# in every process. What writes a file asks chief first, a bool; checkpoints keep the dict state.
every_steps = {1: print_step, 10: print_loss}
at_step = {}


def metric_pre(output, batch):
    """Returns the arguments of the metrics' update_state."""
    _, target, weight = ctl.unpack(batch)
    return (target, output) if weight is None else (target, output, weight)


def eval_pre(loss, batch, train_model):
    """Returns the loss that an evaluation reports, and terms that do not depend on the batch."""
    return ctl.weighted(loss, batch), ctl.regularization(train_model)
