"""Metrics of training: over all examples since the last line, without leaving the graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import make_hooks, regression_data, set_weights
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


def hooks(**more: Any) -> Any:
    own = {
        "create_dataset": lambda per_replica_batch_size: data(per_replica_batch_size),
        "create_model": classifier,
        "create_loss": lambda: entropy,
        "create_opt": lambda lr: keras.optimizers.SGD(lr),
        "create_train_metrics": metrics,
        "train_metric_pre": arguments,
    }
    return make_hooks(**{**own, **more})


def by_hand(every: int = EVERY) -> list[dict[str, float]]:
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
        if step % every == 0 or step == STEPS:
            lines.append({"step": step, **{n: float(m.result()) for n, m in found.items()}})
        if step % every == 0:
            for metric in found.values():
                metric.reset_state()
    return lines


def logged(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name != "split"}
        for line in lines
        if line["split"] == "train" and "accuracy" in line
    ]


def assert_lines(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-5)


SETTINGS: dict[str, Any] = {"learning_rate": 0.1, "log_every": EVERY, "batch_size": BATCH}


@pytest.mark.parametrize(
    "settings",
    [
        {"virtual_devices": 2, "accumulate_steps": 2},
        {"jit_compile": True},
    ],
)
def test_they_are_those_of_a_plain_loop(train: Train, settings: dict[str, Any]) -> None:
    state = train(hooks(), steps=STEPS, **SETTINGS, **settings)
    assert_lines(logged(state.run_dir), by_hand())
    assert state.functions.trace_counts() == [1]  # no step was observed for them


def test_a_resumed_run_writes_what_a_whole_one_does(train: Train) -> None:
    for steps in (3, 9):
        train(hooks(), steps=steps, **SETTINGS, virtual_devices=2)
    state = train(hooks(), steps=STEPS, **SETTINGS, virtual_devices=2)
    expected = {line["step"]: line for line in by_hand()}
    found = {line["step"]: line for line in logged(state.run_dir)}
    assert {3, 9} < {*found}  # the ends of the shorter runs
    assert_lines([found[step] for step in expected], [*expected.values()])
