"""The default of every hook, as callbacks.py shows it.

Each hook here stands in callbacks.py word for word; tests/engine compares the two. What they are
written with is in helpers.py.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ctl_core import regularization, trainable_variables
from ctl_core.console import report, show_step
from ctl_core.helpers import (
    deferred,
    leading_dimension,
    nan_to_zero,
    unpack,
    weighted,
)


def make_batches(dataset):
    return dataset


def count_examples(batch):
    return leading_dimension(batch)


def create_opt(lr):
    return keras.optimizers.Nadam(learning_rate=lr, epsilon=0.001)


def create_ckpt(ckpt_path, step, lr, optimizer, train_model, train_loss):
    ckpt = tf.train.Checkpoint(
        step=step, lr=lr, optimizer=optimizer, train_model=train_model, train_loss=train_loss
    )
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=50)


def input_pre(batch):
    inputs, _, _ = unpack(batch)
    return inputs


def loss_pre(output, batch):
    _, target, _ = unpack(batch)
    return output, target


def grad_pre(loss, batch, train_model):
    return weighted(loss, batch), regularization(train_model), trainable_variables(train_model)


def update_pre(gradients):
    gradients = [nan_to_zero(gradient) for gradient in gradients]
    clipped, _ = tf.clip_by_global_norm(gradients, 10.0)
    return clipped, gradients


@deferred
def print_step(step):
    show_step(step)


def print_loss(step, loss):
    report(step, loss=loss)


every_steps = {1: print_step, 10: print_loss}
at_step: dict[int, Any] = {}


turns: list[str] = []


def create_train_metrics():
    return {}


def create_metrics():
    return {}


def metric_pre(output, batch):
    _, target, weight = unpack(batch)
    return (target, output) if weight is None else (target, output, weight)


train_metric_pre = metric_pre


def eval_pre(loss, batch, train_model):
    return weighted(loss, batch), regularization(train_model)
