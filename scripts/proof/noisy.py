"""A tiny program with Dropout, which scripts/soak_operations.py starts many times.

Each replica draws its own random numbers, and has its own part of the sum of a metric, which it
saves in a file of its process. The checkpoint manager keeps two checkpoints, so that
even a run of a few steps removes old ones.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

EXAMPLES = 96


def read_examples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    inputs = random.normal(size=(EXAMPLES, 4)).astype(np.float32)
    return inputs, np.sin(inputs.sum(axis=1, keepdims=True)).astype(np.float32)


def create_dataset(global_batch_size: int) -> tf.data.Dataset:
    examples = tf.data.Dataset.from_tensor_slices(read_examples())
    return examples.shuffle(EXAMPLES, seed=1).batch(global_batch_size)


def create_eval_dataset(global_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(read_examples()).batch(global_batch_size)


def create_model() -> keras.Model:
    layers = [keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def square_error(pair: Any) -> tf.Tensor:
    """Returns the squared error of each example."""
    output, target = pair
    return tf.square(output - target)[:, 0]


def create_loss() -> Any:
    return square_error


def create_train_metrics() -> dict[str, keras.Metric]:
    return {"error": keras.metrics.MeanAbsoluteError()}


def train_metric_pre(output: Any, batch: Any) -> Any:
    return batch[1], output


def create_opt(lr: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(lr)


def update_pre(gradients: Any) -> Any:
    return gradients, gradients


def create_ckpt(
    ckpt_path: str, step: Any, lr: Any, optimizer: Any, train_model: Any
) -> tuple[tf.train.Checkpoint, tf.train.CheckpointManager]:
    ckpt = tf.train.Checkpoint(step=step, lr=lr, optimizer=optimizer, train_model=train_model)
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=2)


every_steps: dict[int, Any] = {}
