"""What is done after each update, and the number of the step in hooks of the graph."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.golden import small
from tests.helpers.cases import Followed, assert_weights, regression_data, sliced, small_model
from tests.helpers.fixtures import Train

STEPS, BATCH, RATE = 12, 16, 0.1


def follow(train_model: Any, step: Any) -> None:
    """A soft update at each step; and a hard one at each fifth."""
    decay = tf.where(step % 5 == 0, 0.0, 0.9)
    for target, online in zip(
        train_model.target.variables, train_model.online.variables, strict=True
    ):
        target.assign(decay * target + (1 - decay) * online)
        online.assign(tf.clip_by_value(online, -0.4, 0.4))


def batches() -> tf.data.Dataset:
    return small.create_dataset(BATCH).repeat().take(STEPS)


def loop() -> Followed:
    """The same as a plain loop."""
    model, optimizer = Followed(), keras.optimizers.SGD(RATE)
    for step, (inputs, target) in enumerate(batches(), 1):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(inputs) - target) ** 2) / BATCH
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        follow(model, tf.constant(step))
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"virtual_devices": 2},
        {"virtual_devices": 4},
        {"accumulate_steps": 2, "virtual_devices": 2},
        {"jit_compile": True},
    ],
)
def test_a_target_network_follows_as_in_a_plain_loop(train: Train, settings: Any) -> None:
    own = small.hooks(create_model=Followed, update_post=follow, every_steps={4: lambda loss: None})
    state = train(own, steps=STEPS, learning_rate=RATE, **settings)
    assert_weights(state, loop(), rtol=2e-5)


def test_an_update_that_is_skipped_has_nothing_after_it(train: Train) -> None:
    """With a loss scale, an update that is not finite is skipped."""

    def count(train_model: Any, step: Any) -> None:
        train_model.count.assign_add(1.0)

    def model() -> Any:
        made = small_model()
        made.count = made.add_weight(shape=(), initializer="zeros", trainable=False)
        return made

    def grad_pre(loss: Any, train_model: Any, step: Any) -> Any:
        return tf.where(step == 3, np.inf, 1.0) * loss, 0.0, train_model.trainable_variables

    own = small.hooks(create_model=model, update_post=count, grad_pre=grad_pre)
    state = train(own, steps=6, precision="float16", on_nan="ignore")
    assert float(state.train_model.count) == int(state.optimizer.iterations) < 6


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_number_of_the_step_in_the_graph(train: Train, replicas: int) -> None:
    """An annealed term and a warm-up, with steps of their own and many in one call."""

    def grad_pre(loss: Any, train_model: Any, step: Any) -> Any:
        kernel = train_model.layers[0].kernel
        strength = 0.1 / tf.cast(step, tf.float32)
        return loss, strength * tf.reduce_sum(kernel**2), train_model.trainable_variables

    def update_pre(gradients: Any, step: Any) -> Any:
        share = tf.minimum(tf.cast(step, tf.float32) / 6.0, 1.0)
        return [gradient * share for gradient in gradients], gradients

    seen: list[int] = []
    own = small.hooks(
        grad_pre=grad_pre,
        update_pre=update_pre,
        every_steps={3: lambda loss: None, 5: lambda step: seen.append(step)},
    )
    state = train(own, steps=STEPS, learning_rate=RATE, virtual_devices=replicas)
    assert seen == [5, 10] and all(type(step) is int for step in seen)
    model = small_model()
    for step, (inputs, target) in enumerate(batches(), 1):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(inputs) - target) ** 2) / BATCH
            loss += 0.1 / step * tf.reduce_sum(model.layers[0].kernel ** 2)
        for variable, gradient in zip(
            model.trainable_variables,
            tape.gradient(loss, model.trainable_variables),
            strict=True,
        ):
            variable.assign_sub(RATE * min(step / 6, 1) * gradient)
    assert_weights(state, model, rtol=2e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_may_be_named(train: Train, replicas: int) -> None:
    """Noise in training only; the loss of the evaluation is that of the clean inputs."""

    def input_pre(batch: Any, training: bool) -> Any:
        return batch[0] * 2.0 if training else batch[0]

    def loss_pre(output: Any, batch: Any, training: bool) -> Any:
        return output, batch[1] + (3.0 if training else 0.0)

    def loss(pair: Any, training: bool) -> Any:
        return tf.reduce_sum((pair[0] - pair[1]) ** 2, 1) * (0.5 if training else 1.0)

    own = small.hooks(
        input_pre=input_pre,
        loss_pre=loss_pre,
        create_loss=lambda: loss,
        create_eval_dataset=sliced(regression_data()),
    )
    state = train(own, steps=1, learning_rate=RATE, virtual_devices=replicas)
    model = small_model()
    inputs, target = (part[:BATCH] for part in regression_data())
    with tf.GradientTape() as tape:
        value = 0.5 * tf.reduce_sum((model(inputs * 2.0) - target - 3.0) ** 2) / BATCH
    for variable, gradient in zip(
        model.trainable_variables, tape.gradient(value, model.trainable_variables), strict=True
    ):
        variable.assign_sub(RATE * gradient)
    assert_weights(state, model, rtol=2e-5)
    inputs, target = (part[:96] for part in regression_data())
    error = float(tf.reduce_mean(tf.reduce_sum((model(inputs) - target) ** 2, 1)))
    assert state.metrics["loss"] == pytest.approx(error, rel=1e-5)
