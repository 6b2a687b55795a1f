"""Metrics of training: over all examples since the last line, without leaving the graph."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.golden import small
from tests.helpers.fixtures import Train

STEPS, EVERY = 14, 4
SETTINGS: dict[str, Any] = {"learning_rate": 0.05, "log_every": EVERY}


def metrics() -> dict[str, keras.Metric]:
    return {
        "error": keras.metrics.MeanAbsoluteError(),
        "f1": keras.metrics.F1Score("macro", 0.5),  # makes its variables when first used
        "mean": keras.metrics.Mean(),
    }


def arguments(loss: Any, output: Any, batch: Any) -> Any:
    return {
        "error": (batch[1], output),
        "f1": (tf.cast(batch[1] > 0.5, tf.float32), output),
        "mean": loss,
    }


HOOKS = small.hooks(create_train_metrics=metrics, train_metric_pre=arguments)


def by_hand() -> list[dict[str, float]]:
    """The lines of a plain loop, with the metrics of Keras."""
    found, lines = metrics(), []
    for step, batch in enumerate(small.create_dataset(16).repeat().take(STEPS), 1):
        output = small.plain(step - 1, lambda _: 0.05)(batch[0])
        loss = small.squared_error((output, batch[1]))
        for name, values in arguments(loss, output, batch).items():
            found[name].update_state(*(values if isinstance(values, tuple) else (values,)))
        if step % EVERY == 0 or step == STEPS:
            lines.append({"step": step, **{n: float(m.result()) for n, m in found.items()}})
            for metric in found.values():
                metric.reset_state()
    return lines


def assert_lines(state: Any) -> None:
    """Compares the lines of metrics.jsonl, by their steps."""
    lines = {line["step"]: line for line in state.history if line["split"] == "train"}
    for line in by_hand():
        found = {name: lines[line["step"]][name] for name in line}
        assert found == pytest.approx(line, rel=1e-5)


@pytest.mark.parametrize(
    "settings", [{"virtual_devices": 2, "accumulate_steps": 2}, {"jit_compile": True}]
)
def test_they_are_those_of_a_plain_loop(train: Train, settings: dict[str, Any]) -> None:
    assert_lines(train(HOOKS, steps=STEPS, **SETTINGS, **settings))


def test_a_resumed_run_writes_what_a_whole_one_does(train: Train) -> None:
    for steps in (3, 9, STEPS):
        state = train(HOOKS, steps=steps, **SETTINGS, virtual_devices=2)
    assert_lines(state)
