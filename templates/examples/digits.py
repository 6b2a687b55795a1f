"""Every part of training as a hook, with its default: the file to edit.

A hook names only the arguments it uses, in any order. All hooks, and what each may name:
`python -m ctl_core hooks`. One that you delete means its default.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from ctl_core import (
    deferred,
    leading_dimension,
    nan_to_zero,
    regularization,
    report,
    show_step,
    trainable_variables,
    unpack,
    weighted,
)

DIGITS = Path(__file__).parent / "data/digits.npz"


def load_digits(part):
    """Returns images, float32 [n, 8, 8, 1] from 0 to 1, and labels, int64 [n]."""
    with np.load(DIGITS) as file:
        rows = file[part]
        images = file["images"][rows, :, :, None].astype(np.float32) / 16.0
        return images, file["labels"][rows].astype(np.int64)


# ---- Yours: data, model, loss, metrics ----------------------------------------------------------


# One pass over the training data; the engine repeats it, and a pass ends with its last full global
# batch. A resumed run goes on with exactly the next example if random changes to examples are
# tf.random.stateless_* with seeds from ctl_core.data.with_seeds. A shuffle buffer travels in every
# checkpoint: for much data in memory, ctl_core.data.index_shuffle shuffles indices instead.
def create_dataset(per_replica_batch_size, config):
    images, labels = load_digits("train")
    examples = tf.data.Dataset.from_tensor_slices((images, labels))
    shuffled = examples.shuffle(len(images), seed=config.seed)
    return shuffled.batch(per_replica_batch_size, drop_remainder=True)


# One pass over the evaluation data. Without this hook there is no evaluation.
def create_eval_dataset(per_replica_batch_size):
    return tf.data.Dataset.from_tensor_slices(load_digits("test")).batch(per_replica_batch_size)


def create_model(hparams):
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


# The loss of a batch is a sum, or one number per example: the engine divides by the global batch
# size, so that the result does not depend on the number of replicas.
def create_loss():
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_loss(loss_input):
        output, target = loss_input
        return cross_entropy(target, output)

    return train_loss


def create_metrics():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


# ---- Below stand the defaults: change or delete at will -----------------------------------------


# -- Data -----------------------------------------------------------------------------------------


# The last change to the repeated dataset, before its elements are dealt out to the replicas.
def make_batches(dataset):
    return dataset


# How many examples a batch holds: the first dimension of its tensors. Where they differ in it, as
# in graphs or point sets, say which counts: return tf.shape(labels)[0].
def count_examples(batch):
    return leading_dimension(batch)


# -- Optimizer and checkpoints --------------------------------------------------------------------


# lr is an object: create_opt, summaries and arithmetic take it as it is, lr.assign(x) changes it,
# and what SGD(lr * 0.1) trains with. With a schedule, the other hooks get the schedule's value.
def create_opt(lr):
    return keras.optimizers.Nadam(learning_rate=lr, epsilon=0.001)


def create_ckpt(ckpt_path, step, lr, optimizer, train_model, train_loss):
    ckpt = tf.train.Checkpoint(
        step=step, lr=lr, optimizer=optimizer, train_model=train_model, train_loss=train_loss
    )
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=50)


# -- The step: traced into the graph, once per replica --------------------------------------------


# What the model is called with. A batch is (inputs, targets), or (inputs, targets, weights) with a
# sample weight for each example, as Keras has it; of another one say here and below what is what.
def input_pre(batch):
    inputs, _, _ = unpack(batch)
    return inputs


# What train_loss is called with.
def loss_pre(output, batch):
    _, target, _ = unpack(batch)
    return output, target


# What the sum of the losses is divided by: the number of examples, unless this hook says how much a
# batch weighs. The weights of all replicas and micro-batches are added up. For losses per token:
#
# def batch_weight(batch):
#     return tf.reduce_sum(batch["mask"])


# The loss summed over the batch, terms that do not depend on the batch, and what to train.
def grad_pre(loss, batch, train_model):
    return weighted(loss, batch), regularization(train_model), trainable_variables(train_model)


# From the gradients, summed over all replicas, to those applied and those to display.
def update_pre(gradients):
    gradients = [nan_to_zero(gradient) for gradient in gradients]
    clipped, _ = tf.clip_by_global_norm(gradients, 10.0)
    return clipped, gradients


# -- Between the steps: plain Python on the host --------------------------------------------------


# deferred: only looks on, so the engine need not leave the graph for it at every step.
@deferred
def print_step(step):
    show_step(step)


# report prints, writes scalar summaries for TensorBoard and a line to metrics.jsonl.
def print_loss(step, loss):
    report(step, loss=loss)


# {N: function or list of functions}, after every N-th step. In a cluster they run in every process:
# what writes a file names chief, a bool, and asks it first. What a hook has to remember, also
# across a resume, is kept in state, a dict: state["best"] = min(float(loss), state["best"]).
every_steps = {1: print_step, 10: print_loss}

# {N: function or list of functions}, once after step N, also across a resume. For example
# {300: halve} with: def halve(lr): lr.assign(lr * 0.5). A hook that raises
# ctl_core.StopTraining ends training: it is evaluated and saved as if done, until more steps are
# asked for.
at_step = {}


# -- Evaluation -----------------------------------------------------------------------------------


# What each metric's update_state is called with.
def metric_pre(output, batch):
    _, target, weight = unpack(batch)
    return (target, output) if weight is None else (target, output, weight)


# The loss that the evaluation reports.
def eval_pre(loss, batch, train_model):
    return weighted(loss, batch), regularization(train_model)
