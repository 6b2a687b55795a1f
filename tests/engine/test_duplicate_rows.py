"""Tests Adam with embedding rows that occur several times in a batch (see docs/guarantees.md)."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import compare
from tests.helpers.cases import make_hooks
from tests.helpers.project import Train

IDS = np.array([0, 0, 1, 0, 2, 2, 1, 1], dtype="int64")
TARGETS = np.array([1.0, -0.9, 0.3, 0.2, 2.0, -1.9, 0.5, -0.4], dtype="float32")
BATCH, STEPS, RATE = 4, 6, 0.1


def create_model() -> keras.Model:
    table = keras.layers.Embedding(5, 1, embeddings_initializer="zeros")
    return keras.Sequential([keras.Input((), dtype="int64"), table])


def create_dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(BATCH)


def train_in_a_loop(adds_up: bool) -> Any:
    model = create_model()
    optimizer = keras.optimizers.Adam(RATE)
    for ids, targets in create_dataset().repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids)[:, 0] - targets) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        if adds_up:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model.weights


def test_rows_that_occur_twice_are_added_up_before_adam_sees_them(train: Train) -> None:
    hooks = make_hooks(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=lambda: lambda pair: (pair[0][:, 0] - pair[1]) ** 2,
        create_opt=lambda lr: keras.optimizers.Adam(lr),
        update_pre=lambda gradients: (gradients, gradients),
    )

    state = train(hooks, steps=STEPS, batch_size=BATCH, learning_rate=RATE)
    weights = state.train_model.weights
    compare.assert_close(weights, train_in_a_loop(adds_up=True), 1e-5, 1e-6)
    as_keras_does = train_in_a_loop(adds_up=False)[0].numpy()
    assert np.abs(weights[0].numpy() - as_keras_does).max() > 0.01
