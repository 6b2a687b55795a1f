"""Programs of several kinds, and the loop of one device that people write for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.cases import (
    FEATURES,
    l2_model,
    norm_model,
    regression_data,
    set_weights,
    squared_error,
)

STEPS, BATCH = 20, 16


def sgd_steps(model: keras.Model, steps: int, rate: float) -> Iterator[None]:
    """Trains on the regression data without an optimizer; yields after each step."""
    data = tf.data.Dataset.from_tensor_slices(regression_data()).batch(BATCH, drop_remainder=True)
    for inputs, target in data.repeat().take(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(inputs) - target) ** 2) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(rate * gradient)
        yield


def two_by_two_model() -> keras.Model:
    left, right = keras.Input((FEATURES,), name="left"), keras.Input((FEATURES,), name="right")
    both = keras.layers.Concatenate()([left, right])
    hidden = keras.layers.Dense(6, activation="tanh")(both)
    outputs = {"sum": keras.layers.Dense(1)(hidden), "product": keras.layers.Dense(2)(hidden)}
    return set_weights(keras.Model({"left": left, "right": right}, outputs))


def embedding_model() -> keras.Model:
    return set_weights(
        keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(7, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
    )


class UnusedWeight(keras.Model):
    """Has a variable that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = keras.layers.Dense(1), keras.layers.Dense(1)
        self.used.build((None, FEATURES))
        self.unused.build((None, FEATURES))

    def call(self, inputs: Any) -> Any:
        return self.used(inputs)


def unused_model() -> keras.Model:
    return set_weights(UnusedWeight())


def two_by_two_data() -> Any:
    inputs, target = regression_data()
    other = inputs[::-1].copy()
    return (
        {"left": inputs, "right": other},
        {"sum": target, "product": np.concatenate([target, -target], axis=1)},
    )


def two_by_two_loss(loss_input: Any) -> tf.Tensor:
    output, target = loss_input
    return squared_error((output["sum"], target["sum"])) + 0.5 * squared_error(
        (output["product"], target["product"])
    )


def embedding_data() -> Any:
    words = np.random.default_rng(3).integers(0, 7, (100, 3)).astype("int32")
    return words, words.sum(1, keepdims=True).astype("float32")


CASES: dict[str, tuple[Callable[[], keras.Model], Any, Any]] = {
    "l2": (l2_model, regression_data, squared_error),
    "batch_norm": (norm_model, regression_data, squared_error),
    "two_inputs_two_outputs": (two_by_two_model, two_by_two_data, two_by_two_loss),
    "embedding": (embedding_model, embedding_data, squared_error),
    "no_gradient": (unused_model, regression_data, squared_error),
}


def batches(data: Any) -> Iterator[Any]:
    """Yields global batches, pass after pass, the remainder of each pass left out."""
    examples = len(tf.nest.flatten(data)[0])
    while True:
        for start in range(0, examples - BATCH + 1, BATCH):
            yield tf.nest.map_structure(lambda x, s=start: tf.constant(x[s : s + BATCH]), data)


def by_hand(case: str, optimizer: Any, clip: float | None) -> tuple[list[np.ndarray], list[float]]:
    """Trains without the engine; returns the weights and the gradient's norm at each step."""
    create_model, data, loss = CASES[case]
    model, norms = create_model(), []
    stream = batches(data())
    for _ in range(STEPS):
        inputs, target = next(stream)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(loss((model(inputs, training=True), target))) / BATCH
            total += tf.add_n(model.losses) if model.losses else 0.0
        variables = model.trainable_variables
        gradients = tape.gradient(total, variables)
        pairs = [
            (tf.convert_to_tensor(g), v)  # dense: the norm of the gradient itself
            for g, v in zip(gradients, variables, strict=True)
            if g is not None
        ]
        norms.append(float(tf.linalg.global_norm([g for g, _ in pairs])))
        if clip is not None:
            clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], clip)
            pairs = [(g, v) for g, (_, v) in zip(clipped, pairs, strict=True)]
        optimizer.apply_gradients(pairs)
    return model.get_weights(), norms
