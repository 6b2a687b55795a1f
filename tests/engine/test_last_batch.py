"""``last_batch: keep``: each example of a pass counts once, however many replicas share a step.

The reference is a plain loop of one device over ``dataset.batch(B)``, whose last batch is smaller.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import (
    FEATURES,
    assert_weights,
    l2_model,
    regression_data,
    set_weights,
    small_model,
    squared_error,
    synchronized_model,
)
from tests.helpers.fixtures import Train
from tests.helpers.kept import examples, hooks, keep, of_replicas, of_steps, plain, shuffled


@pytest.mark.parametrize("form", [of_replicas, of_steps])
@pytest.mark.parametrize(
    ("number", "batch_size", "replicas", "accumulate"),
    [
        pytest.param(10, 4, 1, 1, marks=pytest.mark.slow),
        (10, 4, 2, 1),
        (9, 8, 2, 1),
        (9, 8, 1, 2),
        pytest.param(12, 8, 1, 2, marks=pytest.mark.slow),
        (9, 8, 2, 2),
        pytest.param(14, 8, 2, 2, marks=pytest.mark.slow),
        pytest.param(17, 8, 4, 1, marks=pytest.mark.slow),
        pytest.param(3, 8, 2, 1, marks=pytest.mark.slow),
        (6, 8, 2, 1),
        pytest.param(16, 8, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_a_plain_loop(
    train: Train, form: Any, number: int, batch_size: int, replicas: int, accumulate: int
) -> None:
    """Some replicas, or a whole micro-batch, have no example in the last step."""
    state = keep(
        train,
        hooks(create_dataset=form(number)),
        batch_size=batch_size,
        virtual_devices=replicas,
        accumulate_steps=accumulate,
    )
    assert_weights(state, plain(examples(number).batch(batch_size), l2_model()))
    assert state.progress.examples == 3 * number
    assert state.step == 3 * -(-number // batch_size)


@pytest.mark.slow
def test_a_run_goes_on_with_other_replicas(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its position is reached by reading: whole steps of real examples, not of stand-ins."""
    some = hooks(create_dataset=shuffled(19))
    whole = keep(train, some, run_name="whole")
    for steps, settings in ((3, {}), (4, {"virtual_devices": 2}), (9, {"accumulate_steps": 4})):
        state = keep(train, some, steps=steps, epochs=None, **settings)
    assert "reading and dropping 27 examples" in capsys.readouterr().out
    assert_weights(state, whole)
    keep(train, some, run_name="other", steps=4, epochs=None)
    state = keep(train, some, run_name="other", steps=5, epochs=None, last_batch="drop")
    assert "since it was saved with last_batch keep." in capsys.readouterr().out
    assert state.step == 5


@pytest.mark.parametrize(("replicas", "accumulate"), [(2, 1), (1, 2), (2, 2)])
def test_batch_weight_of_nobody_counts_for_nothing(
    train: Train, replicas: int, accumulate: int
) -> None:
    def of_weights(batch: Any, output: Any) -> tf.Tensor:
        weight = tf.abs(batch[1])
        return tf.reduce_sum(weight * squared_error((output, batch[1]))[:, None]) / tf.reduce_sum(
            weight
        )

    some = hooks(
        create_dataset=of_replicas(9),
        create_loss=lambda: lambda pair: squared_error(pair) * tf.abs(pair[1][:, 0]),
        batch_weight=lambda batch: tf.reduce_sum(tf.abs(batch[1])),
    )
    state = keep(train, some, virtual_devices=replicas, accumulate_steps=accumulate)
    assert_weights(state, plain(examples(9).batch(8), l2_model(), loss=of_weights))


@pytest.mark.parametrize(("number", "replicas"), [(9, 2), (13, 2), (10, 4)])
@pytest.mark.slow
def test_synchronized_batch_normalization(train: Train, number: int, replicas: int) -> None:
    """Of the examples there are; moving statistics are those of one device, too."""
    some = hooks(create_dataset=of_replicas(number), create_model=lambda: synchronized_model(True))
    state = keep(train, some, virtual_devices=replicas)
    expected = plain(examples(number).batch(8), synchronized_model(False))
    # Divided by the spread of two examples, rounding shows, and how depends on the processor.
    for weight, other in zip(state.train_model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [10, 14])
def test_moving_statistics_count_each_example_once(train: Train, number: int) -> None:
    """A replica without examples keeps its own; one of r of R goes N r / R times as far."""

    def still(gradients: Any) -> Any:
        return [tf.zeros_like(gradient) for gradient in gradients], gradients

    some = hooks(
        create_dataset=of_replicas(number),
        create_model=lambda: synchronized_model(False),
        update_pre=still,
    )
    state = keep(train, some, virtual_devices=2)
    first, norm, _ = state.train_model.layers
    hidden = first(regression_data()[0][:number]).numpy()
    mean, variance = np.zeros([2, 8]), np.ones([2, 8])
    for _ in range(3):
        for rows in (hidden[:8], hidden[8:]):
            for replica, share in enumerate((rows[:4], rows[4:])):
                if len(share):
                    part = 0.1 * 2 * len(share) / len(rows)
                    mean[replica] += part * (share.mean(0) - mean[replica])
                    variance[replica] += part * (share.var(0) - variance[replica])
    np.testing.assert_allclose(norm.moving_mean, mean.mean(0), atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance, variance.mean(0), atol=1e-6)


class Counter(keras.layers.Layer):
    """Draws random numbers in two ways, adds noise of one, and keeps a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)
        self.generator = tf.random.Generator.from_seed(5)
        self.calls = self.add_weight(shape=(), dtype="int64", trainable=False, initializer="zeros")

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1)
        noise = keras.random.normal(tf.shape(inputs), seed=self.seeds)
        return inputs + 0.1 * noise + 0.1 * self.generator.normal(tf.shape(inputs))


def noisy_model() -> keras.Model:
    model = keras.Sequential([keras.Input((FEATURES,)), Counter(), keras.layers.Dense(1)])
    set_weights(model.layers[1])
    return model


def test_an_empty_micro_batch_writes_nothing_and_draws_nothing(train: Train) -> None:
    state = keep(
        train, hooks(create_dataset=of_replicas(3), create_model=noisy_model), accumulate_steps=2
    )
    layer = state.train_model.layers[0]
    assert int(layer.calls) == 3
    once = keras.random.SeedGenerator(3)
    for _ in range(3):
        keras.random.normal((3, FEATURES), seed=once)
    np.testing.assert_array_equal(layer.seeds.state, once.state)


def test_a_replica_without_examples_draws_nothing_also_when_resumed(train: Train) -> None:
    """Its generators fall behind the other replica's; a checkpoint holds those of both."""

    def model() -> keras.Model:
        layers = [keras.Input((FEATURES,)), keras.layers.Dropout(0.5, seed=1)]
        return set_weights(keras.Sequential([*layers, keras.layers.Dense(1)]))

    some = hooks(create_dataset=of_replicas(10), create_model=model)
    whole = keep(train, some, virtual_devices=2, run_name="whole")
    states = whole.strategy.experimental_local_results(whole.found.generators[0])
    first, second = (int(state.numpy()[1]) for state in states)
    assert first > second > 0
    for steps in (2, 3, 6):
        state = keep(train, some, virtual_devices=2, steps=steps, epochs=None)
    assert_weights(state, whole, 0)


def test_train_metrics_are_of_each_example_once(train: Train) -> None:
    def metrics(batch: Any, output: Any) -> Any:
        return {"mean": (batch[1],), "error": (batch[1], output)}

    some = hooks(
        create_dataset=of_replicas(9),
        create_train_metrics=lambda: {
            "mean": keras.metrics.Mean(),
            "error": keras.metrics.MeanSquaredError(),
        },
        train_metric_pre=metrics,
    )
    state = keep(train, some, virtual_devices=2, log_every=2)
    (line, *_) = [line for line in state.history if line["split"] == "train"]
    assert line["mean"] == pytest.approx(regression_data()[1][:9].mean(), rel=1e-5)


@pytest.mark.parametrize(("replicas", "accumulate"), [(2, 1), (1, 2), (2, 2)])
def test_host_hooks_get_what_there_is(train: Train, replicas: int, accumulate: int) -> None:
    """Of a replica without examples nothing; the loss is the mean over those there are."""
    seen = []

    def look(step: int, output: Any, batch: Any, loss: Any) -> None:
        seen.append((step, output.numpy(), batch[1].numpy(), float(loss)))

    some = hooks(create_dataset=of_replicas(9), create_model=small_model, every_steps={1: look})
    keep(train, some, virtual_devices=replicas, accumulate_steps=accumulate)
    target = regression_data()[1]
    for step, output, labels, loss in seen:
        expected = target[8:9] if step % 2 == 0 else target[:8]
        np.testing.assert_array_equal(np.sort(labels, axis=0), np.sort(expected, axis=0))
        assert loss == pytest.approx(((output - labels) ** 2).sum(1).mean(), rel=1e-5)
    assert len(seen) == 6
