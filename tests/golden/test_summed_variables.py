"""Variables with the aggregation SUM: each of several devices has only its own part of the sum."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.reference import Reference


def create_sum(*shape: int) -> tf.Variable:
    return tf.Variable(
        tf.zeros(shape),
        trainable=False,
        name="amount",
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


class Summing(keras.layers.Layer):
    """Adds up its inputs in a variable, and computes its output with a given function.

    Attributes:
        amount: a variable with the aggregation SUM
        other: a variable that is equal on all devices
    """

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.use = use

    def build(self, shape: Any) -> None:
        self.amount = create_sum()
        self.other = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.mean = keras.metrics.Mean()

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.amount.assign_add(tf.reduce_sum(inputs))
        return self.use(self, inputs, training)


def scale(layer: Summing, inputs: Any, _: bool) -> Any:
    return inputs / (1.0 + layer.amount)  # refused


def scale_in_branch(layer: Summing, inputs: Any, _: bool) -> Any:
    large = tf.function(lambda: layer.amount > 1.0)()  # refused
    return tf.cond(large, lambda: 0.5 * inputs, lambda: inputs)


def scale_in_loop(layer: Summing, inputs: Any, _: bool) -> Any:
    def double(number: Any, values: Any) -> Any:
        return number + 1.0, values * 1.1

    start = -tf.tanh(layer.amount)  # refused
    return tf.while_loop(lambda number, _: number < 0.0, double, (start, inputs))[1]


def scale_in_evaluations(layer: Summing, inputs: Any, training: bool) -> Any:
    if training:
        return inputs
    return inputs / (1.0 + tf.abs(layer.amount))  # refused


def move_another_variable(layer: Summing, inputs: Any, _: bool) -> Any:
    layer.other.assign(0.5 * layer.amount)  # refused
    return inputs


def add_rest(layer: Summing, inputs: Any, training: bool) -> Any:
    if training:
        rest = tf.reduce_sum(inputs) - layer.amount  # refused
        layer.amount.assign_add(rest * rest)
    return inputs


def scale_by_metric(layer: Summing, inputs: Any, _: bool) -> Any:
    layer.mean.update_state(inputs)
    return inputs / (2.0 + layer.mean.result())


REFUSED = (
    scale, scale_in_branch, scale_in_loop, scale_in_evaluations, move_another_variable, add_rest,
)  # fmt: skip


def hooks_with(use: Callable[..., Any], **more: Any) -> Any:
    more = {"create_eval_dataset": small.create_eval_dataset, **more}
    return small.hooks(create_model=lambda: small.model_with(Summing(use)), **more)


def find_line(function: Callable[..., Any]) -> int:
    first: int = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()[first:]
    return first + 1 + next(i for i, line in enumerate(lines) if line.endswith("# refused"))


@pytest.mark.parametrize("use", REFUSED)
def test_a_use_of_a_part_is_refused_on_several_devices(
    train: engine.Train, use: Callable[..., Any]
) -> None:
    line = rf"create_model \(test_summed_variables.py:{find_line(use)}\): reads \S*amount, a "
    with pytest.raises(ctl_core.SetupError, match=line):
        train(hooks_with(use), **small.settings(1), virtual_devices=2)


def test_a_use_of_the_metric_of_a_layer_is_refused_on_several_devices(train: engine.Train) -> None:
    with pytest.raises(ctl_core.SetupError, match=r"create_model .*: reads \S*total, a variable"):
        train(hooks_with(scale_by_metric), **small.settings(1), virtual_devices=2)


def test_update_post_must_not_use_a_part(train: engine.Train) -> None:
    def update_post(train_model: keras.Model) -> None:
        kernel = train_model.weights[0].value
        layer: Any = train_model.layers[1]
        kernel.assign(kernel * (1.0 - 0.1 * tf.tanh(layer.amount)))

    hooks = hooks_with(lambda layer, inputs, training: inputs, update_post=update_post)
    with pytest.raises(ctl_core.SetupError, match=r"update_post .*: reads \S*amount"):
        train(hooks, **small.settings(1), virtual_devices=2)


def test_one_device_may_use_the_sum(train: engine.Train) -> None:
    hooks = hooks_with(scale)
    plain = Reference(hooks).train(small.create_dataset(small.BATCH).take(2))
    state = train(hooks, **small.settings(2))
    compare.assert_close(state.train_model.weights, plain.parts.train_model.weights)


def use_rightly(layer: Summing, inputs: Any, training: bool) -> Any:
    """Uses the sum in all ways that do not depend on the number of devices."""
    if training:
        layer.amount.assign(0.9 * layer.amount + tf.reduce_sum(inputs))
        layer.amount.assign_sub((layer.amount - tf.reduce_sum(inputs)) * 0.1)
        layer.mean.update_state(inputs)
        tf.print("the part", layer.amount, output_stream="file:///dev/null")
    total = ctl_core.all_reduce(layer.amount)
    layer.other.assign(total)
    return inputs / (1.0 + total**2)


def test_right_uses_of_a_sum_do_not_depend_on_the_devices(train: engine.Train) -> None:
    """The batches have 17 rows, which two devices cannot share equally."""
    metrics = {"error": keras.metrics.MeanAbsoluteError()}

    hooks = hooks_with(use_rightly, create_metrics=lambda: metrics)
    settings = small.settings(4, batch_size=17)
    one = train(hooks, **settings, run_name="one")
    two = train(hooks, **settings, run_name="two", virtual_devices=2)
    compare.assert_close(two.train_model.weights, one.train_model.weights)
    assert abs(float(one.train_model.layers[1].other)) > 0.1
