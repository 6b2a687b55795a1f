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
    assert_weights,
    l2_model,
    regression_data,
    small_model,
    squared_error,
    synchronized_model,
)
from tests.helpers.fixtures import Train
from tests.helpers.kept import examples, hooks, keep, of_replicas, of_steps, plain


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
