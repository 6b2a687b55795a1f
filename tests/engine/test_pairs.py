"""A loss of all pairs by broadcasting [b, 1] against [b] is refused, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import FEATURES, make_hooks, regression_data, set_weights, sliced
from tests.helpers.fixtures import Train

X, Y = regression_data()
Loss = Callable[[Any], Any]


@tf.function
def compiled(output: Any, labels: Any) -> Any:
    error = output - labels if tf.reduce_sum(output) > 0 else 2.0 * (output - labels)
    return tf.reduce_mean(error**2, -1)


# The programs that people write, of which labels of shape [b] make a matrix.
WRONG: dict[str, tuple[Loss, str]] = {
    "a mean over the last axis": (lambda p: tf.reduce_mean(tf.square(p[0] - p[1]), -1), "Sub"),
    "the sum of all": (lambda p: tf.reduce_sum(tf.square(p[0] - p[1])), "Sub"),
    "in a tf.function": (lambda p: compiled(p[0], p[1]), "Sub"),
}


def batches(drop_remainder: bool, size: int = 8) -> Callable[[], tf.data.Dataset]:
    data = tf.data.Dataset.from_tensor_slices((X, Y[:, 0]))
    return lambda: data.batch(size, drop_remainder=drop_remainder)


@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_all_pairs_by_broadcasting_are_refused(
    train: Train, name: str, drop_remainder: bool
) -> None:
    loss, op = WRONG[name]
    hooks = make_hooks(create_dataset=batches(drop_remainder), create_loss=lambda: loss)
    line = loss.__code__.co_firstlineno
    message = rf"^create_loss \(test_pairs.py:\d+\): {op} of the shapes \[8, 1\] and \[8\] gives"
    with pytest.raises(ctl_core.SetupError, match=message) as caught:
        train(hooks, steps=1, batch_size=8)
    assert "labels[None, :]" in str(caught.value)
    if name != "in a tf.function":
        assert f"test_pairs.py:{line})" in str(caught.value)


def test_grad_pre_and_loss_pre_are_named(train: Train) -> None:
    def grad_pre(output: Any, batch: Any, train_model: Any) -> Any:
        loss = tf.abs(output - batch[1])
        return tf.reduce_sum(loss, 1), 0.0, train_model.trainable_variables

    def loss_pre(output: Any, batch: Any) -> Any:
        return tf.reduce_sum(output * batch[1], 1)

    for name, hooks in {
        "grad_pre": {"grad_pre": grad_pre, "create_loss": lambda: lambda p: tf.reduce_sum(p[0], 1)},
        "loss_pre": {"loss_pre": loss_pre, "create_loss": lambda: lambda loss: loss},
    }.items():
        line = hooks[name].__code__.co_firstlineno + 1  # type: ignore[attr-defined]
        with pytest.raises(ctl_core.SetupError, match=rf"^{name} \(test_pairs.py:{line}\): "):
            train(make_hooks(create_dataset=batches(True), **hooks), steps=1, batch_size=8)


def quantile(pair: Any) -> Any:
    """As many quantiles as there are examples in a batch, by chance."""
    output, labels = pair
    error = labels[:, None] - output
    return tf.reduce_sum(tf.maximum(0.125 * tf.range(8.0) * error, -error), 1)


def ranking(pair: Any) -> Any:
    scores = tf.squeeze(pair[0], -1)
    margin = tf.nn.relu(1.0 - (scores[:, None] - scores))
    return tf.reduce_sum(tf.where(pair[1][:, None] > pair[1], margin, 0.0), 1)


def contrastive(pair: Any) -> Any:
    logits = tf.matmul(pair[0], pair[0], transpose_b=True) * (pair[1] - pair[1][:, None])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(logits)[0]), logits)


RIGHT: dict[str, tuple[int, Loss]] = {
    "one shape": (1, lambda p: tf.square(tf.squeeze(p[0], -1) - p[1])),
    "a loss of Keras'": (1, lambda p: keras.losses.MeanSquaredError(reduction="none")(p[1], p[0])),
    "meant pairs": (1, lambda p: tf.reduce_mean(tf.square(p[0] - p[1][None, :]), -1)),
    "quantiles": (8, quantile),
    "a ranking": (1, ranking),
    "contrastive": (3, contrastive),
}


@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_meant_trains(train: Train, name: str, drop_remainder: bool) -> None:
    units, loss = RIGHT[name]

    def create_model() -> keras.Model:
        return set_weights(keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(units)]))

    hooks = make_hooks(
        create_dataset=batches(drop_remainder),
        create_model=create_model,
        create_loss=lambda: loss,
    )
    assert train(hooks, steps=1, batch_size=8).step == 1


def test_batches_of_one_example_have_no_pairs_by_chance(train: Train) -> None:
    loss = WRONG["the sum of all"][0]
    hooks = make_hooks(create_dataset=batches(True, 1), create_loss=lambda: loss)
    with pytest.raises(ctl_core.SetupError, match=r"Sub of the shapes \[1, 1\] and \[1\]"):
        train(hooks, steps=1, batch_size=1)
    hooks = make_hooks(create_dataset=sliced((X, Y)), create_loss=lambda: loss)
    assert train(hooks, steps=1, batch_size=1).step == 1
