"""Variables that the forward pass writes to: the same on any number of devices, or pointed out.

A moving average of the user's own is one of the whole batch if replicas exchange what they add to
it. One that does not is refused before training; what is the same on all replicas anyway is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import (
    FEATURES,
    assert_weights,
    make_hooks,
    regression_data,
    sgd,
    squared_error,
)
from tests.helpers.fixtures import Train
from tests.helpers.resume import StatefulRnn, dense, seeded

STEPS, BATCH, RATE = 6, 16, 0.05


def over_replicas(value: Any) -> Any:
    if replica := tf.distribute.get_replica_context():
        value = replica.all_reduce(tf.distribute.ReduceOp.MEAN, value)
    return value


class Running(keras.layers.Layer):
    """Takes a moving average of its inputs off them."""

    def __init__(self, exchange: Callable[[Any], Any] = lambda mean: mean, **options: Any) -> None:
        super().__init__(name="running")
        self.exchange, self.options = exchange, options

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(
            shape=(shape[-1],), trainable=False, initializer="zeros", name="mean", **self.options
        )

    def call(self, inputs: Any) -> Any:
        mean = self.exchange(tf.reduce_mean(inputs, 0))
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return inputs - self.mean


def running_model(*args: Any, **options: Any) -> keras.Model:
    inputs = keras.Input((FEATURES,))
    hidden = Running(*args, **options)(dense(4)(inputs))
    return keras.Model(inputs, dense(1, 4)(hidden))


class Writing(tf.Module):
    """Writes to its variables in whatever way ``write`` has it."""

    def __init__(self, write: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.dense, self.write = dense(1), write
        self.value = tf.Variable(tf.zeros(FEATURES), trainable=False)
        self.count = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.summed = tf.Variable(
            tf.zeros(FEATURES),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        self.averaged = tf.Variable(
            tf.zeros(FEATURES),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
        self.generator = tf.random.Generator.from_seed(1)
        self.metric = keras.metrics.Mean()

    def __call__(self, inputs: Any) -> Any:
        self.write(self, inputs)
        return self.dense(inputs)


def in_a_function(model: Any, inputs: Any) -> None:
    @tf.function
    def within(given: Any) -> None:
        for _ in tf.range(2):
            model.value.assign_add(given[0])

    within(inputs)


def in_a_branch(model: Any, inputs: Any) -> None:
    tf.cond(
        inputs[0, 0] > 0,
        lambda: model.value.assign_add(tf.ones(FEATURES)).read_value(),
        lambda: model.value.read_value(),
    )


def of_a_sum(model: Any, inputs: Any) -> None:
    model.summed.assign_add(inputs[0])
    model.value.assign(model.summed)


def noise(model: Any, inputs: Any) -> None:
    model.value.assign(model.generator.normal([FEATURES]))


UNLIKE = (in_a_function, in_a_branch, of_a_sum, noise)


@pytest.mark.parametrize("write", UNLIKE)
def test_what_replicas_would_write_differently_is_refused_before_training(
    train: Train, write: Callable[[Any, Any], Any]
) -> None:
    hooks = make_hooks(create_model=lambda: Writing(write))
    with pytest.raises(ctl_core.SetupError) as error:
        train(hooks, steps=2, virtual_devices=2)
    first = write.__code__.co_firstlineno
    lines = [f"test_writes.py:{line}: assigns to train_model/value what" for line in
             range(first, first + 9)]  # fmt: skip
    assert any(str(error.value).startswith(line) for line in lines), error.value
    assert train(hooks, steps=2).step == 2


def other_layers() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.SpectralNormalization(keras.layers.Dense(6)),
            keras.layers.BatchNormalization(),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(0.3, seed=1),
            keras.layers.Dense(1),
        ]
    )
    return model


def counts(model: Any, inputs: Any) -> None:
    @tf.function
    def within(given: Any) -> None:
        for _ in tf.range(2):
            model.count.assign_add(tf.shape(given, tf.int64)[0])

    within(inputs)
    model.value.assign(model.value * 0.5 + 1.0)
    model.summed.assign_add(inputs[0])
    model.metric.update_state(inputs)
    model.generator.normal([2])


def exchanged(model: Any, inputs: Any) -> None:
    rows = tf.distribute.get_replica_context().all_gather(inputs, axis=0)
    model.value.assign(tf.reduce_max(rows, axis=0))


@pytest.mark.parametrize(
    "create", [other_layers, lambda: Writing(counts), lambda: Writing(exchanged)]
)
def test_what_is_the_same_on_all_replicas_is_neither_refused_nor_warned_of(
    train: Train, capsys: pytest.CaptureFixture[str], create: Callable[[], Any]
) -> None:
    hooks = make_hooks(create_model=seeded(create))
    assert train(hooks, steps=3, virtual_devices=2).step == 3
    assert "assigns to" not in capsys.readouterr().out


def averaged_when_read(model: Any, inputs: Any) -> None:
    model.averaged.assign(0.9 * model.averaged + 0.1 * inputs[0])


@pytest.mark.parametrize(
    ("create", "name"),
    [
        (lambda: running_model(aggregation="mean"), "mean (of the layer 'running', Running)"),
        (lambda: Writing(averaged_when_read), "train_model/averaged"),
    ],
)
def test_what_is_shared_though_each_replica_gives_another_value_is_warned_of(
    train: Train, capsys: pytest.CaptureFixture[str], create: Callable[[], Any], name: str
) -> None:
    train(make_hooks(create_model=create), steps=1, virtual_devices=2)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{name} what each replica's own" in said and "with the aggregation mean" in said


class Told(keras.Model):
    """A moving average that ``update_pre`` writes to, of the output of all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = dense(4), dense(1, 4)
        self.mean = self.add_weight(shape=(4,), trainable=False, initializer="zeros", name="mean")

    def call(self, inputs: Any) -> Any:
        hidden = self.first(inputs)
        return self.last(hidden - self.mean), hidden


def assign_mean(gradients: Any, output: Any, train_model: Any) -> Any:
    mean = over_replicas(tf.reduce_mean(output[1], 0))
    train_model.mean.assign(0.9 * train_model.mean + 0.1 * mean)
    return gradients, gradients


def told_by_hand() -> keras.Model:
    model, optimizer = Told(), keras.optimizers.SGD(RATE)
    inputs, target = regression_data()
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        with tf.GradientTape() as tape:
            output, hidden = model(inputs[part])
            loss = tf.reduce_mean(squared_error((output, target[part])))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.mean.assign(0.9 * model.mean + 0.1 * tf.reduce_mean(hidden, 0))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model


def test_micro_batches_that_each_write_are_warned_of_with_a_cure_that_is_exact(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = make_hooks(create_model=lambda: running_model(over_replicas))
    train(hooks, steps=1, accumulate_steps=2, virtual_devices=2, run_name="warned")
    said = " ".join(capsys.readouterr().out.split())
    assert "/mean (of the layer 'running', Running) in each of the 2 micro-batches" in said
    assert "assign in update_pre, which gets the output of all micro-batches" in said
    hooks = make_hooks(
        create_model=Told,
        create_opt=sgd,
        loss_pre=lambda output, batch: (output[0], batch[1]),
        update_pre=assign_mean,
    )
    expected = told_by_hand().get_weights()
    assert np.abs(expected[-1]).max() > 0.1
    for devices in (1, 2):
        state = train(hooks, steps=STEPS, learning_rate=RATE, accumulate_steps=2,
                      virtual_devices=devices, run_name=f"told{devices}")  # fmt: skip
        assert_weights(state, expected, rtol=1e-5)
    assert "assigns to" not in capsys.readouterr().out


def test_counters_and_statistics_may_be_written_in_micro_batches(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spectral normalisation, too, takes a step for each of them, and changes the weights by it."""
    hooks = make_hooks(create_model=lambda: Writing(counts))
    state = train(hooks, steps=1, accumulate_steps=2, run_name="counts")
    assert state.train_model.count.numpy() == 2 * BATCH
    assert "assigns to" not in capsys.readouterr().out
    train(make_hooks(create_model=other_layers), steps=1, accumulate_steps=2, run_name="layers")
    warnings = [one for one in capsys.readouterr().out.split("warning: ") if "assigns to" in one]
    assert [one.split(" ")[0] for one in warnings] == ["the", "the"]
    assert "/kernel (of the layer" in warnings[0] and "SpectralNormalization)" in warnings[1]


def test_the_state_of_a_recurrent_layer_is_one_replicas(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = make_hooks(create_model=StatefulRnn)
    with pytest.raises(ctl_core.SetupError) as error:
        train(hooks, batch_size=32, virtual_devices=2)
    assert str(error.value).startswith("train_model/rnn/")
    assert "is the state that the layer 'simple_rnn" in str(error.value)
    train(hooks, steps=1, batch_size=32, accumulate_steps=2)
    assert "carries from one of the 2 micro-batches" in " ".join(capsys.readouterr().out.split())
