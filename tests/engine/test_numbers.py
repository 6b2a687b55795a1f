"""The update that hooks have by default, ragged batches, and several objectives, by hand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import (
    assert_weights,
    make_hooks,
    regression_data,
    set_weights,
    sgd,
    squared_error,
    unclipped,
)
from tests.helpers.fixtures import Train

BATCH = 16


@pytest.mark.parametrize("replicas", [1, 2])
def test_default_update_clips_at_ten_and_drops_nan(train: Train, replicas: int) -> None:
    def steep(loss_input: Any) -> tf.Tensor:
        output, target = loss_input
        return squared_error((output * 100.0, target))

    def one_nan(loss: Any, train_model: Any) -> Any:
        kernel = train_model.layers[0].kernel
        nan = tf.sqrt(-1.0 - tf.square(kernel[0, 0]))  # its gradient is NaN in that one entry
        return loss, nan, train_model.trainable_variables

    seen: list[Any] = []
    hooks = make_hooks(
        create_loss=lambda: steep,
        create_opt=sgd,
        grad_pre=one_nan,
        every_steps={
            1: lambda update_gradients, display_gradients, gradients: seen.append(
                (update_gradients, display_gradients, gradients)
            )
        },
    )
    train(hooks, steps=2, virtual_devices=replicas)
    for update, display, raw in seen:
        assert sum(np.isnan(g).sum() for g in raw) == 1
        for shown, gradient in zip(display, raw, strict=True):
            np.testing.assert_array_equal(shown, np.nan_to_num(gradient, nan=0.0))
        norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in display))
        assert norm > 10.0
        for applied, shown in zip(update, display, strict=True):
            np.testing.assert_allclose(applied, shown * min(1.0, 10.0 / norm), rtol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_ragged_batches(train: Train, replicas: int) -> None:
    rows = [list(range(1, 1 + n % 4 + 1)) for n in range(32)]
    target = np.array([[float(sum(row))] for row in rows], "float32")

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        ragged = tf.ragged.constant(rows, dtype=tf.float32)
        return tf.data.Dataset.from_tensor_slices((ragged, target)).batch(per_replica_batch_size)

    seen: list[Any] = []
    hooks = make_hooks(
        create_dataset=create_dataset,
        create_model=lambda: set_weights(
            keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ),
        create_opt=sgd,
        input_pre=lambda batch: tf.reduce_sum(batch[0], axis=1, keepdims=True),
        every_steps={4: lambda batch: seen.append(batch)},
    )
    state = train(hooks, steps=4, batch_size=8, virtual_devices=replicas)
    assert seen[0][0].to_list() == rows[24:32]
    model = set_weights(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    optimizer = sgd(0.01)
    for start in range(0, 32, 8):
        x = np.array([[sum(row)] for row in rows[start : start + 8]], "float32")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - target[start : start + 8]) ** 2) / 8
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 10.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert_weights(state, model, rtol=1e-5)


def test_several_objectives_update_each_by_its_own_optimizer(train: Train) -> None:
    class Pair(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = tf.Variable([1.0]), tf.Variable([1.0])

        def __call__(self, inputs: Any) -> Any:
            return inputs[:, :1] * self.first, inputs[:, :1] * self.second

    seen: list[Any] = []
    hooks = make_hooks(
        create_model=Pair,
        create_opt=lambda lr: {
            "first": keras.optimizers.SGD(lr),
            "second": keras.optimizers.SGD(0.1),
        },
        create_loss=lambda: lambda loss_input: loss_input,
        grad_pre=lambda output, train_model: {
            "first": (tf.reduce_sum(output[0] ** 2), 0.0, [train_model.first]),
            "second": (tf.reduce_sum(output[1]), 0.0, [train_model.second]),
        },
        update_pre=unclipped,
        every_steps={1: lambda loss, gradients: seen.append((loss, gradients))},
    )
    state = train(hooks, steps=1, virtual_devices=2)
    x = regression_data()[0][:BATCH, :1]
    gradient_first, gradient_second = 2 * (x**2).sum() / BATCH, x.sum() / BATCH
    np.testing.assert_allclose(state.train_model.first, [1 - 0.01 * gradient_first], rtol=1e-6)
    np.testing.assert_allclose(state.train_model.second, [1 - 0.1 * gradient_second], rtol=1e-6)
    loss, gradients = seen[0]
    np.testing.assert_allclose(loss["first"], (x**2).sum() / BATCH, rtol=1e-6)
    np.testing.assert_allclose(gradients["second"][0], [gradient_second], rtol=1e-6)
