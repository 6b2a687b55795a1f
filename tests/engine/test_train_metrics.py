"""Metrics of training: over all examples since the last line, without leaving the graph."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import make_hooks, regression_data, set_weights, sgd
from tests.helpers.fixtures import Train

STEPS, BATCH, EVERY = 14, 16, 4


def classes() -> tuple[np.ndarray, np.ndarray]:
    """Labels of three classes."""
    inputs, target = regression_data()
    return inputs, np.digitize(target[:, 0], [-0.5, 1.5]).astype("int64")


def classifier() -> keras.Model:
    return set_weights(
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    )


def entropy(pair: Any) -> Any:
    output, target = pair
    return tf.nn.sparse_softmax_cross_entropy_with_logits(target, output)


def metrics() -> dict[str, keras.Metric]:
    return {
        "accuracy": keras.metrics.SparseCategoricalAccuracy(),
        "recall": keras.metrics.F1Score(average="macro"),  # makes its variables when first used
        "entropy": keras.metrics.Mean(),
    }


def arguments(loss: Any, output: Any, batch: Any) -> Any:
    return {
        "accuracy": (batch[1], output),
        "recall": (tf.one_hot(batch[1], 3), tf.nn.softmax(output)),
        "entropy": loss,
    }


def data(size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(classes()).batch(size, drop_remainder=True)


def hooks() -> Any:
    return make_hooks(
        create_dataset=lambda per_replica_batch_size: data(per_replica_batch_size),
        create_model=classifier,
        create_loss=lambda: entropy,
        create_opt=sgd,
        create_train_metrics=metrics,
        train_metric_pre=arguments,
    )


def by_hand() -> list[dict[str, float]]:
    """A plain loop, with its metrics as it logs them."""
    model, found, lines = classifier(), metrics(), []
    for step, batch in enumerate(data(BATCH).repeat().take(STEPS), 1):
        with tf.GradientTape() as tape:
            output = model(batch[0])
            loss = entropy((output, batch[1]))
            total = tf.reduce_mean(loss)
        for variable, gradient in zip(
            model.trainable_variables, tape.gradient(total, model.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        for name, values in arguments(loss, output, batch).items():
            found[name].update_state(*(values if isinstance(values, tuple) else (values,)))
        if step % EVERY == 0 or step == STEPS:
            lines.append({"step": step, **{n: float(m.result()) for n, m in found.items()}})
            for metric in found.values():
                metric.reset_state()
    return lines


def assert_lines(state: Any, expected: list[dict[str, float]]) -> None:
    """Compares the lines of metrics.jsonl, by their steps."""
    lines = {line["step"]: line for line in state.history if line["split"] == "train"}
    for line in expected:
        found = {name: lines[line["step"]][name] for name in line}
        assert found == pytest.approx(line, rel=1e-5)


SETTINGS: dict[str, Any] = {"learning_rate": 0.1, "log_every": EVERY, "batch_size": BATCH}


@pytest.mark.parametrize(
    "settings", [{"virtual_devices": 2, "accumulate_steps": 2}, {"jit_compile": True}]
)
def test_they_are_those_of_a_plain_loop(train: Train, settings: dict[str, Any]) -> None:
    state = train(hooks(), steps=STEPS, **SETTINGS, **settings)
    assert_lines(state, by_hand())
    assert state.functions.trace_counts() == [1]  # no step was observed for them


def test_a_resumed_run_writes_what_a_whole_one_does(train: Train) -> None:
    for steps in (3, 9, STEPS):
        state = train(hooks(), steps=steps, **SETTINGS, virtual_devices=2)
    assert_lines(state, by_hand())
