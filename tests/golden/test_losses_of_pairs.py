"""A loss that is a mean over pairs has the right scale with each form that the warning names."""

from typing import Any

import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small


def compare_pairs(errors: Any, all_errors: Any) -> Any:
    """Returns, for each example, the mean over all examples of the squared difference of errors."""
    return tf.reduce_mean((errors - tf.transpose(all_errors)) ** 2, axis=1)


def one_number_per_example(pair: Any) -> Any:
    errors = pair[0] - pair[1]
    return compare_pairs(errors, ctl_core.all_gather(errors))


def mean_times_rows(pair: Any) -> Any:
    errors = ctl_core.all_gather(pair[0] - pair[1])
    rows = tf.cast(tf.shape(pair[0])[0], tf.float32)
    return rows * tf.reduce_mean(compare_pairs(errors, errors))


@pytest.mark.parametrize("loss", [one_number_per_example, mean_times_rows])
def test_a_mean_over_pairs_trains_as_in_a_plain_loop(
    train_small: engine.Train, loss: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    state = train_small(small.hooks(create_loss=lambda: loss), virtual_devices=3)
    model = small.create_model()
    for inputs, target in small.create_dataset(small.BATCH).take(6):
        with tf.GradientTape() as tape:
            errors = model(inputs) - target
            mean = tf.reduce_mean(compare_pairs(errors, errors))
        gradients = tape.gradient(mean, model.trainable_variables)
        for gradient, variable in zip(gradients, model.trainable_variables, strict=True):
            variable.assign_sub(small.RATE * gradient)
    compare.assert_close(state.train_model.weights, model.weights)
    assert "warning" not in capsys.readouterr().out
