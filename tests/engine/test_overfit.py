"""overfit_batches: the first global batches of a pass, over and over."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tests.golden import small
from tests.helpers.cases import (
    assert_weights,
    regression_data,
    sliced,
    small_model,
)
from tests.helpers.fixtures import Train


def examples() -> tf.data.Dataset:
    """Shuffled anew in each pass."""
    return tf.data.Dataset.from_tensor_slices(regression_data()).shuffle(100, seed=3)


def shuffled(global_batch_size: int) -> tf.data.Dataset:
    return examples().batch(global_batch_size, drop_remainder=True)


def plain_loop(batches: list[Any], steps: int) -> keras.Model:
    model, optimizer = small_model(), keras.optimizers.Adam(0.01)
    for step in range(steps):
        inputs, target = batches[step % len(batches)]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - target) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    return model


def adam_hooks(**more: Any) -> Any:
    own = {"create_dataset": shuffled, "create_opt": lambda lr: keras.optimizers.Adam(lr)}
    return small.hooks(**{**own, **more})


def test_more_than_there_are_goes_on_into_the_next_pass(train: Train) -> None:
    state = train(adam_hooks(create_dataset=sliced(regression_data())), steps=14, overfit_batches=7)
    pass_of = list(sliced(regression_data())(16).take(6))
    assert_weights(state, plain_loop([*pass_of, pass_of[0]], 14), rtol=2e-4)
