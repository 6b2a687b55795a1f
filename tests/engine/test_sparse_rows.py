"""Gradients of embeddings: rows of a word that comes twice are added up wherever that matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import assert_weights, make_hooks, set_weights, squared_error, unclipped
from tests.helpers.fixtures import Train

WORDS, BATCH, STEPS, RATE = 5, 16, 8, 0.1

OPTIMIZERS: dict[str, Callable[[Any], keras.optimizers.Optimizer]] = {
    "momentum": lambda lr: keras.optimizers.SGD(lr, momentum=0.9),
    "global_clipnorm": lambda lr: keras.optimizers.SGD(lr, global_clipnorm=0.05),
    "Adagrad": lambda lr: keras.optimizers.Adagrad(lr),
}


def create_model() -> keras.Model:
    layers = [keras.Input((6,), dtype="int32"), keras.layers.Embedding(WORDS, 4)]
    return set_weights(keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)]))


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    random = np.random.default_rng(0)
    data = random.integers(0, WORDS, (64, 6)), random.normal(size=(64, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices(data).batch(per_replica_batch_size)


def clipped(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, 0.05)[0], gradients


def by_hand(create_opt: Callable[[Any], Any], update_pre: Callable[[Any], Any]) -> Any:
    """A loop whose gradients are dense, so that nothing in them comes twice."""
    model = create_model()
    optimizer = create_opt(RATE)
    for words, target in create_dataset(BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(squared_error((model(words), target))) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = update_pre([tf.convert_to_tensor(gradient) for gradient in gradients])[0]
        optimizer.apply(gradients, model.trainable_variables)
    return model.get_weights()


@pytest.mark.parametrize(
    ("name", "update_pre"), [*((name, unclipped) for name in OPTIMIZERS), ("momentum", clipped)]
)
def test_optimizers_get_what_a_dense_gradient_would_give_them(
    train: Train, name: str, update_pre: Callable[[Any], Any]
) -> None:
    hooks = make_hooks(
        create_dataset=create_dataset,
        create_model=create_model,
        create_opt=lambda lr: OPTIMIZERS[name](lr),
        update_pre=update_pre,
    )
    state = train(hooks, steps=STEPS, batch_size=BATCH, learning_rate=RATE)
    assert_weights(state, by_hand(OPTIMIZERS[name], update_pre), rtol=1e-4)
