"""When host hooks run and with which values, against a plain loop; also across a resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core import trainer
from tests.helpers.cases import (
    assert_weights,
    make_hooks,
    regression_data,
    sgd,
    small_model,
    squared_error,
)
from tests.helpers.fixtures import Train

BATCH = 16


def plain_loop(steps: int) -> dict[int, dict[str, Any]]:
    """Trains by hand with SGD and returns what there was to see at each step."""
    inputs, target = regression_data()
    model, seen = small_model(), {}
    for step in range(1, steps + 1):
        start = (step - 1) % (len(inputs) // BATCH) * BATCH
        x, y = inputs[start : start + BATCH], target[start : start + BATCH]
        with tf.GradientTape() as tape:
            output = model(x, training=True)
            loss = tf.reduce_sum(squared_error((output, y))) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        clipped = tf.clip_by_global_norm(gradients, 10.0)[0]
        for variable, gradient in zip(model.trainable_variables, clipped, strict=True):
            variable.assign_sub(0.01 * gradient)
        seen[step] = {
            "loss": loss.numpy(),
            "output": output.numpy(),
            "batch": (x, y),
            "gradients": [g.numpy() for g in gradients],
            "weights": model.get_weights(),
        }
    return seen


class Recorder:
    """Hooks that write down the step and the values they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, Any]]] = []

    def hook(self, name: str) -> Any:
        def record(
            step: int, loss: Any, output: Any, batch: Any, gradients: Any, train_model: Any
        ) -> None:
            values = {
                "loss": loss.numpy(),
                "output": output.numpy(),
                "batch": tuple(part.numpy() for part in batch),
                "gradients": [g.numpy() for g in gradients],
                "weights": train_model.get_weights(),
            }
            self.calls.append((name, step, values))

        return record

    def steps(self, name: str) -> list[int]:
        return [step for called, step, _ in self.calls if called == name]


def recording_hooks(recorder: Recorder) -> Any:
    return make_hooks(
        create_opt=sgd,
        every_steps={
            3: recorder.hook("third"),
            7: [recorder.hook("seventh"), recorder.hook("too")],
        },
        at_step={4: recorder.hook("fourth"), 14: recorder.hook("fourteenth")},
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_and_values_equal_those_of_a_plain_loop(train: Train, replicas: int) -> None:
    recorder = Recorder()
    train(recording_hooks(recorder), steps=20, virtual_devices=replicas)
    assert recorder.steps("third") == [3, 6, 9, 12, 15, 18]
    assert recorder.steps("seventh") == recorder.steps("too") == [7, 14]
    assert (recorder.steps("fourth"), recorder.steps("fourteenth")) == ([4], [14])
    assert [name for name, step, _ in recorder.calls if step == 14] == [
        "seventh",
        "too",
        "fourteenth",
    ]
    expected = plain_loop(20)
    for _, step, values in recorder.calls:
        for (path, value), (_, reference) in zip(flat(values), flat(expected[step]), strict=True):
            np.testing.assert_allclose(value, reference, rtol=2e-5, atol=1e-6, err_msg=path)


def flat(values: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(k, leaf) for k in sorted(values) for leaf in tf.nest.flatten(values[k])]


def test_deferred_hooks_see_every_step_once_and_in_order(train: Train) -> None:
    order: list[Any] = []
    hooks = make_hooks(
        every_steps={
            1: ctl_core.deferred(lambda step: order.append(step)),
            10: lambda loss: order.append("ten"),
        }
    )
    train(hooks, steps=25, ckpt_every=5)
    expected: list[Any] = []
    for step in range(1, 26):
        expected += [step] + (["ten"] if step % 10 == 0 else [])
    assert order == expected


def test_where_a_graph_call_ends_changes_nothing(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = train(make_hooks(), steps=50, run_name="long")
    monkeypatch.setattr(trainer, "MOST_STEPS", 3)
    short = train(make_hooks(), steps=50, run_name="short")
    assert_weights(short, long, rtol=0)


def test_a_step_is_traced_once_for_what_hooks_read_of_it(train: Train) -> None:
    def input_pre(batch: Any) -> Any:
        traced.append(batch)
        return batch[0]

    def quiet(step: int) -> None: ...
    def watch(loss: Any) -> None: ...
    def look(loss: Any, gradients: Any) -> None: ...

    found: list[int] = []
    for hooks in ({50: quiet}, {7: quiet, 10: watch, 14: watch, 50: look}):
        traced: list[Any] = []
        own = make_hooks(input_pre=input_pre, every_steps=hooks)
        train(own, steps=60, run_name=f"of-{len(found)}")
        found.append(len(traced))
    assert found[1] - found[0] == 2  # for the loss, and for the loss with gradients
