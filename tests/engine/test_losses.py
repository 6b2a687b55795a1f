"""A loss that is one number: a mean over the batch is refused before training, others train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import assert_weights, dropout_model, make_hooks, regression_data
from tests.helpers.fixtures import Train

Loss = Callable[[Any], Any]
X, Y = regression_data()


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]


class Noisy(keras.Model):
    """Draws in each call, whether it trains or not, as a VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.seeds = keras.layers.Dense(5), keras.random.SeedGenerator(3)

    def call(self, inputs: Any) -> Any:
        mean = self.mean(inputs)
        return mean + 0.3 * keras.random.normal(tf.shape(mean), seed=self.seeds), mean


def vae_loss(loss_input: Any) -> Any:
    (made, mean), inputs = loss_input
    return tf.reduce_mean(tf.reduce_sum((made - inputs) ** 2, 1) + 0.5 * tf.reduce_sum(mean**2, 1))


def dice(pair: Any) -> Any:
    output, target = tf.sigmoid(pair[0]), tf.cast(pair[1] > 0, tf.float32)
    both, either = tf.reduce_sum(output * target, 1), tf.reduce_sum(output + target, 1)
    return 1.0 - tf.reduce_mean((2.0 * both + 1.0) / (either + 1.0))


def mean_error(pair: Any) -> Any:
    return tf.reduce_mean((pair[0] - pair[1]) ** 2)


def sum_error(pair: Any) -> Any:
    return tf.reduce_sum((pair[0] - pair[1]) ** 2)


def signed(pair: Any) -> Any:
    return tf.reduce_mean(pair[0] * tf.sign(pair[1])) - 0.01


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("loss", [vae_loss, dice, mean_error, signed])
def test_a_mean_is_refused(train: Train, loss: Loss, replicas: int) -> None:
    more: dict[str, Any] = {}
    if loss is vae_loss:
        more = {"create_model": Noisy, "loss_pre": lambda output, batch: (output, batch[0])}
    hooks = make_hooks(create_loss=lambda: loss, **more)
    with pytest.raises(ctl_core.SetupError, match=r"^create_loss \(test_losses.py:\d+\): .*mean"):
        train(hooks, steps=1, virtual_devices=replicas)


def barlow(pair: Any) -> Any:
    """Of features that do not correlate, so that less is found the more examples there are."""
    features = tf.random.stateless_normal([tf.shape(pair[0])[0], 20], [1, 2]) + 0.0 * pair[0]
    size = tf.cast(tf.shape(features)[0], tf.float32)
    correlation = tf.matmul(features, features, transpose_a=True) / size
    return tf.reduce_sum((correlation - tf.linalg.diag(tf.linalg.diag_part(correlation))) ** 2)


TRAINS: dict[str, Loss] = {
    "a sum": sum_error,
    "a sum and a constant": lambda pair: sum_error(pair) + 1e4,
    "a root": lambda pair: tf.sqrt(sum_error(pair)),
    "correlations": barlow,
    "zero": lambda pair: 0.0 * sum_error(pair),
    "of this batch size": lambda pair: mean_error((tf.ensure_shape(pair[0], [16, 1]), pair[1])),
}


@pytest.mark.parametrize("name", TRAINS)
def test_what_is_no_mean_trains(
    train: Train, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(make_hooks(create_loss=lambda: TRAINS[name]), steps=1).step == 1
    said = warnings(capsys)
    assert len(said) == (name == "a root"), said
    assert all("create_loss (test_losses.py" in line and "as a whole" in line for line in said)


def test_a_loss_of_each_example_with_every_other_is_refused(train: Train) -> None:
    """What broadcasting makes of [b, 1] and [b]."""
    data = tf.data.Dataset.from_tensor_slices((X, Y[:, 0]))
    hooks = make_hooks(
        create_dataset=lambda: data.batch(8),
        create_loss=lambda: lambda pair: (pair[0] - pair[1]) ** 2,
    )
    message = r"^create_loss \(test_losses.py:\d+\): Sub of the shapes \[8, 1\] and \[8\] compares"
    with pytest.raises(ctl_core.SetupError, match=message):
        train(hooks, steps=1, batch_size=8)


def test_what_is_tried_changes_nothing(train: Train) -> None:
    """Neither the order of the data, nor random numbers, nor what the forward pass writes."""

    def hooks(loss: Loss) -> Any:
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        return make_hooks(
            create_dataset=lambda: data.shuffle(64, seed=1).batch(8),
            create_model=dropout_model,
            create_loss=lambda: loss,
        )

    each = lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2, 1)  # noqa: E731
    tried = train(hooks(sum_error), steps=5, run_name="tried")
    state = train(hooks(each), steps=5, run_name="not")
    assert_weights(tried, state, rtol=1e-5)
