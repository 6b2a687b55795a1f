"""The hooks of the program of ``make prove``: a small CNN on digits with random augmentation.

peers.py uses the same model, data and loss. A batch contains an id for each example. Each step
writes the ids of its examples to a file. The environment variable ``PROOF`` is the path of the
files of an attempt, without the suffix.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.data import with_seeds

DIGITS = Path(__file__).parents[2] / "{{cookiecutter.project_slug}}/data/digits.npz"
BATCH, BATCHES, EPOCHS = 64, 22, 12  # BATCHES: per epoch
EXAMPLES = BATCH * BATCHES
STEPS = BATCHES * EPOCHS
RATE = 0.003
CLIP = 0.5
SEED = 1
SAVE_EVERY = 7


def move(example: Any, seed: tf.Tensor) -> Any:
    """Shifts an image by at most one pixel in each direction, and changes its brightness."""
    image, target = example
    image = tf.image.stateless_random_crop(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), (8, 8, 1), seed)
    return tf.image.stateless_random_brightness(image, 0.2, seed), target


def create_dataset(global_batch_size: int) -> tf.data.Dataset:
    """Returns endless batches (images, targets); a target is a label and an id."""
    with np.load(DIGITS) as file:
        rows = file["train"][:EXAMPLES]
        images = file["images"][rows, :, :, np.newaxis].astype(np.float32) / 16
        targets = np.stack([file["labels"][rows], np.arange(EXAMPLES)], axis=1).astype(np.int64)
    examples = tf.data.Dataset.from_tensor_slices((images, targets)).shuffle(EXAMPLES, seed=SEED)
    return with_seeds(examples, SEED).map(move).batch(global_batch_size, drop_remainder=True)


def create_model() -> keras.Model:
    """Creates a network of two residual blocks; its initial weights are always the same.

    If the environment variable ``NOISY`` is set, it has Dropout and batch normalization.
    """
    seeds = iter(range(4))
    is_noisy = "NOISY" in os.environ

    def convolve(x: Any) -> Any:
        start = keras.initializers.HeNormal(next(seeds))
        return keras.layers.Conv2D(16, 3, padding="same", kernel_initializer=start)(x)

    def normalize(x: Any) -> Any:
        if is_noisy:
            return keras.layers.BatchNormalization(momentum=0.9)(x)
        return keras.layers.GroupNormalization(4)(x)

    inputs = keras.Input((8, 8, 1))
    x = convolve(inputs)
    for _ in range(2):
        x = x + convolve(keras.activations.silu(normalize(x)))
    x = keras.layers.Flatten()(keras.layers.AveragePooling2D(2)(x))
    if is_noisy:
        x = keras.layers.Dropout(0.3, seed=SEED)(x)
    start = keras.initializers.GlorotUniform(next(seeds))
    return keras.Model(inputs, keras.layers.Dense(10, kernel_initializer=start)(x))


def crossentropy(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return keras.losses.sparse_categorical_crossentropy(targets[:, 0], logits, from_logits=True)


def create_loss() -> Any:
    return lambda pair: crossentropy(pair[1], pair[0])


def create_opt(lr: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(lr)


def update_pre(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, CLIP)[0], gradients


def write_ids(step: int, epoch: int, ids: Sequence[Any], norm: float = 0.0) -> None:
    """Writes the ids of a step's examples; then waits a little, to leave time for a kill."""
    with open(os.environ["PROOF"] + ".ids", "a") as file:
        file.write(json.dumps([step, epoch, np.concatenate(ids).tolist(), norm]) + "\n")
    time.sleep(float(os.environ.get("PAUSE", 0)))


def write_weights(model: keras.Model) -> None:
    np.savez(os.environ["PROOF"] + ".npz", *model.get_weights())


def write_step(step: int, batch: Any, gradients: Any, chief: bool) -> None:
    if len(batch[0]) == BATCH and not chief:
        return  # with logical replicas, each process receives the whole batch
    norm = float(tf.linalg.global_norm(gradients))
    write_ids(step, (step - 1) // BATCHES, [batch[1][:, 1]], norm)


def at_end(train_model: keras.Model, chief: bool) -> None:
    if chief:
        write_weights(train_model)


every_steps = {1: write_step}
