"""The update that hooks have by default, ragged batches, and several objectives, by hand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.cases import (
    make_hooks,
    regression_data,
    unclipped,
)
from tests.helpers.fixtures import Train

BATCH = 16


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
