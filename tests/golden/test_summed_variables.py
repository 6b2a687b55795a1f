"""Variables with the aggregation SUM: what a step adds to them is summed over all devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.reference import Reference
from tests.golden.uneven_batches import split, train_on


def create_sum(*shape: int) -> tf.Variable:
    return tf.Variable(
        tf.zeros(shape),
        trainable=False,
        name="amount",
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


class Summing(keras.layers.Layer):
    """Computes its output with a given function, and then adds its inputs to a variable.

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
        outputs = self.use(self, inputs)
        if training:
            self.amount.assign_add(tf.reduce_sum(inputs))
            self.mean.update_state(inputs)
        return outputs


def use_in_many_ways(layer: Summing, inputs: Any) -> Any:
    """Uses the sum in a branch, in a loop, for another variable, and that of a metric."""
    large = tf.function(lambda: layer.amount > 1.0)()
    inputs = tf.cond(large, lambda: 0.5 * inputs, lambda: inputs)
    start = -tf.tanh(layer.amount)
    _, inputs = tf.while_loop(
        lambda number, _: number < 0.0,
        lambda number, values: (number + 1.0, values * 1.1),
        (start, inputs),
    )
    layer.other.assign(0.5 * layer.amount)
    return inputs / (2.0 + tf.abs(layer.amount) + layer.mean.result())


def update_post(train_model: keras.Model) -> None:
    kernel = train_model.weights[0].value
    layer: Any = train_model.layers[1]
    kernel.assign(kernel * (1.0 - 0.1 * tf.tanh(layer.amount)))


@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 1), (1, 2)])
def test_a_step_may_use_the_sum(train: engine.Train, devices: int, micro_batches: int) -> None:
    """The batches have 17 rows, which two devices cannot share equally."""
    hooks = small.hooks(
        create_dataset=lambda: split(68).batch(5),
        create_model=lambda: small.model_with(Summing(use_in_many_ways)),
        create_eval_dataset=small.create_eval_dataset,
        update_post=update_post,
    )
    plain = Reference(hooks).train(split(68).batch(17).take(4))
    state = train_on(train, hooks, devices, 17, steps=4, accumulate_steps=micro_batches)
    compare.assert_close(state.train_model.weights, plain.parts.train_model.weights)
    layer, other = (model.layers[1] for model in (state.train_model, plain.parts.train_model))
    compare.assert_close([layer.amount, layer.mean.total], [other.amount, other.mean.total])
    assert abs(float(other.other)) > 0.1
    expected = plain.evaluate(small.create_eval_dataset(17))
    assert state.metrics == pytest.approx(expected, rel=1e-5)


def read_own_part(layer: Summing, inputs: Any) -> Any:
    layer.amount.assign_add(tf.reduce_sum(inputs))
    return inputs / (1.0 + tf.abs(layer.amount))


def decay(layer: Summing, inputs: Any) -> Any:
    layer.amount.assign(0.5 * layer.amount)
    return inputs


@pytest.mark.parametrize(
    ("use", "differs"), [(read_own_part, "the output 0 differs"), (decay, "the variable .*amount")]
)
def test_uses_that_depend_on_the_number_of_devices(
    use: Callable[..., Any], differs: str, train: engine.Train, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A line at the start names the variable, and --check says what differs."""
    hooks = small.hooks(create_model=lambda: small.model_with(Summing(use)))
    train(hooks, **small.settings(1), virtual_devices=2)
    line = "What replicas write to sequential/summing/amount is combined at the end of a step"
    assert line in capsys.readouterr().out
    config = ctl_core.Config(**small.settings(1), runs_dir=str(tmp_path))
    with pytest.raises(ctl_core.SetupError, match=rf"check: create_model .*: {differs}"):
        ctl_core.check(hooks, config)


def test_the_sum_of_a_sum_is_refused(train: engine.Train) -> None:
    def use(layer: Summing, inputs: Any) -> Any:
        return inputs / (1.0 + tf.abs(ctl_core.all_reduce(layer.amount)))

    hooks = small.hooks(create_model=lambda: small.model_with(Summing(use)))
    message = r"create_model \(test_summed_variables.py:\d+\): all_reduce of \S*amount, which has"
    with pytest.raises(ctl_core.SetupError, match=message):
        train(hooks, **small.settings(1), virtual_devices=2)


def test_a_sum_is_not_trained(train: engine.Train) -> None:
    """As in TensorFlow, a variable that is summed when it is read is not trainable by default."""

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.dense.build((None, small.FEATURES))
            self.amount = tf.Variable(
                1.0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

        def __call__(self, inputs: Any) -> Any:
            return self.dense(inputs) * self.amount

    state = train(small.hooks(create_model=Model), **small.settings(2))
    assert state.train_model.amount.numpy() == 1.0
