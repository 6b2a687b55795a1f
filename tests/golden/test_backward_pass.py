"""Programs whose backward pass does more than TensorFlow's gradients: ``tf.custom_gradient``."""

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.reference import Reference

# ---- Variables that a backward pass writes ------------------------------------------------------


class Fading(keras.layers.Layer):
    """Returns its input, and weakens the gradient by the number of backward passes so far."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def fade(inputs: Any) -> Any:
            def backward(upstream: Any) -> Any:
                self.calls.assign_add(1.0)
                return upstream / (1.0 + 0.1 * self.calls)

            return tf.identity(inputs), backward

        return fade(inputs)


def test_a_counter_in_the_backward_pass_counts_the_steps(train: engine.Train) -> None:
    hooks = small.hooks(create_model=lambda: small.model_with(Fading()))
    settings = small.settings(5, logical_replicas=3)
    one = train(hooks, **settings, run_name="one")
    two = train(hooks, **settings, run_name="two", virtual_devices=2)
    plain = Reference(hooks).train(small.create_dataset(small.BATCH).take(5))
    assert float(one.train_model.layers[1].calls) == 5
    compare.assert_close(one.train_model.weights, plain.parts.train_model.weights)
    compare.assert_same(two.train_model.weights, one.train_model.weights)


# ---- Exchanges in a backward pass ---------------------------------------------------------------


@tf.custom_gradient  # type: ignore[untyped-decorator]
def normalize_gradient(values: Any) -> Any:
    """Returns the values; their gradient is divided by its norm over all rows."""

    def backward(upstream: Any) -> Any:
        return upstream / tf.sqrt(ctl_core.all_reduce(tf.reduce_sum(upstream**2)))  # here

    return tf.identity(values), backward


def normalized_loss(pair: Any) -> Any:
    return small.squared_error((normalize_gradient(pair[0]), pair[1]))


class Normalized(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return normalize_gradient(inputs)


def find_line(words: str) -> int:
    """Returns the number of the line in this file that contains ``words`` and ends with # here."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if words in line and line.endswith("# here")]
    return number


NORMALIZED: dict[str, dict[str, Any]] = {
    "create_loss": {"create_loss": lambda: normalized_loss},
    "loss_pre": {"loss_pre": lambda output, batch: (normalize_gradient(output), batch[1])},
    "create_model": {"create_model": lambda: small.model_with(Normalized())},
}


@pytest.mark.parametrize("hook", NORMALIZED)
@pytest.mark.parametrize("setting", ["accumulate_steps", "logical_replicas"])
def test_an_exchange_in_the_backward_pass_is_refused(
    train: engine.Train, hook: str, setting: str
) -> None:
    """A layer may exchange values in micro-batches, as in its forward pass."""
    hooks = small.hooks(**NORMALIZED[hook])
    settings = {**small.settings(1), setting: 2}
    if (setting, hook) == ("accumulate_steps", "create_model"):
        assert train(hooks, **settings).step == 1
        return
    line = rf"^{hook} \(test_backward_pass.py:{find_line('ctl_core.all_reduce')}\): all_reduce "
    with pytest.raises(ctl_core.SetupError, match=line):
        train(hooks, **settings)


def test_an_exchange_in_the_backward_pass_of_a_loss_trains(train: engine.Train) -> None:
    state = train(small.hooks(**NORMALIZED["create_loss"]), **small.settings(3), virtual_devices=3)
    plain = Reference(small.hooks(**NORMALIZED["create_loss"]))
    plain.train(small.create_dataset(small.BATCH).take(3))
    compare.assert_close(state.train_model.weights, plain.parts.train_model.weights)
