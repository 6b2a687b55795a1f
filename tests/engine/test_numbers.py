"""Weights after 20 steps against a hand-written loop on one device, for 1, 2 and 4 replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.conftest import (
    FEATURES,
    Train,
    make_hooks,
    regression_data,
    set_weights,
    sliced,
    squared_error,
)

STEPS, BATCH = 20, 16
CLIP = 0.05


def l2_model() -> keras.Model:
    regular = keras.regularizers.L2(0.01)
    return set_weights(
        keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(8, activation="tanh", kernel_regularizer=regular),
                keras.layers.Dense(1, kernel_regularizer=regular),
            ]
        )
    )


def norm_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    random = np.random.default_rng(1)
    for layer in (model.layers[0], model.layers[2]):
        layer.set_weights([random.normal(scale=0.3, size=w.shape) for w in layer.get_weights()])
    return model


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


def sgd(lr: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(lr)


def nadam(lr: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Nadam(learning_rate=lr, epsilon=0.001)


def unclipped(gradients: Any) -> Any:
    return gradients, gradients


def clipped(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, CLIP)[0], gradients


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


# With batch normalisation each replica normalises over its own batch: one device only. More
# replicas, and processes, are test_cluster.py's part; tracing for them is what costs here.
RUNS = [(case, n) for case in CASES for n in ((1,) if case == "batch_norm" else (1, 2))]


@pytest.mark.parametrize(("case", "replicas"), RUNS)
@pytest.mark.parametrize("kind", ["sgd", "nadam_clipped"])
def test_weights_equal_those_of_a_plain_loop(
    train: Train, case: str, kind: str, replicas: int
) -> None:
    create_model, data, loss = CASES[case]
    hooks = make_hooks(
        create_dataset=sliced(data()),
        create_model=create_model,
        create_loss=lambda: loss,
        create_opt=sgd if kind == "sgd" else nadam,
        update_pre=unclipped if kind == "sgd" else clipped,
    )
    state = train(hooks, steps=STEPS, virtual_devices=replicas)
    expected, norms = by_hand(
        case, sgd(0.01) if kind == "sgd" else nadam(0.01), None if kind == "sgd" else CLIP
    )
    if kind != "sgd":
        assert min(norms) > CLIP, "the clip has to clip"
    for weight, reference in zip(state.train_model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(weight, reference, rtol=1e-6, atol=1e-6)


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
    for weight, reference in zip(state.train_model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(weight, reference, rtol=1e-5, atol=1e-6)


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
