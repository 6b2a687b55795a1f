"""The learning rate as variable and number, and in schedules: weights are a plain loop's."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.golden import small
from tests.helpers.cases import assert_weights, make_hooks, sgd
from tests.helpers.fixtures import Train

BATCH, RATE, STEPS, CHANGE = 16, 0.05, 12, 5


def assign(lr: Any) -> None:
    lr.assign(lr * 0.5)


def test_lr_is_what_a_schedule_gives_the_optimizer(train: Train) -> None:
    seen: list[tuple[int, float, float, float]] = []

    def create_opt(lr: Any) -> Any:
        return sgd(keras.optimizers.schedules.ExponentialDecay(lr, 1, 0.9))

    def look(step: int, lr: Any, optimizer: Any, display_gradients: Any) -> None:
        seen.append((step, float(lr), float(optimizer.learning_rate), float(display_gradients[0])))

    def update_pre(gradients: Any, lr: Any) -> Any:
        return gradients, [tf.reshape(lr * 1.0, [])]

    hooks = make_hooks(create_opt=create_opt, update_pre=update_pre, every_steps={1: look})
    state = train(hooks, steps=STEPS, learning_rate=RATE, virtual_devices=2)
    for step, rate, used, in_graph in seen:
        assert rate == used == pytest.approx(RATE * 0.9**step)  # of the next update
        assert in_graph == pytest.approx(RATE * 0.9 ** (step - 1))  # of this one
    assert_weights(state, small.plain(STEPS, lambda step: RATE * 0.9 ** (step - 1)), rtol=1e-5)
