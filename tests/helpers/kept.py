"""Data whose last batch is smaller, and the plain loop of one device over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import ctl_core
from tests.helpers.cases import (
    l2_model,
    make_hooks,
    regression_data,
    sgd,
    squared_error,
    unclipped,
)
from tests.helpers.fixtures import Train

RATE = 0.1


def examples(number: int) -> tf.data.Dataset:
    inputs, target = regression_data()
    return tf.data.Dataset.from_tensor_slices((inputs[:number], target[:number]))


def of_replicas(number: int) -> Callable[..., tf.data.Dataset]:
    return lambda per_replica_batch_size: examples(number).batch(per_replica_batch_size)


def of_steps(number: int) -> Callable[..., tf.data.Dataset]:
    return lambda global_batch_size: examples(number).batch(global_batch_size)


def shuffled(number: int) -> Callable[..., tf.data.Dataset]:
    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return examples(number).shuffle(number, seed=3).batch(per_replica_batch_size)

    return create_dataset


def hooks(**more: Any) -> Any:
    base = {"create_model": l2_model, "create_opt": sgd, "update_pre": unclipped}
    return make_hooks(**{**base, **more})


def keep(train: Train, some: Any, **settings: Any) -> ctl_core.State:
    base = {"epochs": 3, "steps": None, "batch_size": 8, "learning_rate": RATE}
    return train(some, **{**base, "last_batch": "keep", "eval_every": 0, **settings})


def plain(
    data: tf.data.Dataset,
    model: Any,
    epochs: int = 3,
    loss: Callable[[Any, Any], tf.Tensor] | None = None,
    rate: float = RATE,
) -> Any:
    """Trains without the engine, on each batch of a dataset as it is; returns the model."""
    optimizer = sgd(rate)

    def mean(batch: Any, output: Any) -> tf.Tensor:
        return tf.reduce_mean(squared_error((output, batch[1])))

    for batch in data.repeat(epochs):
        with tf.GradientTape() as tape:
            output = model(batch[0], training=True)
            total = (loss or mean)(batch, output) + tf.add_n([0.0, *model.losses])
        gradients = tape.gradient(total, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model
