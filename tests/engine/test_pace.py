"""How a run goes, for TensorBoard: learning rates and speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core import pace
from tests.helpers.cases import make_hooks, regression_data, sliced
from tests.helpers.fixtures import Train

BATCH = 16


def scalars(state: ctl_core.State) -> dict[int, dict[str, float]]:
    """What is below ``progress/``, by step."""
    found: dict[int, dict[str, float]] = {}
    for file in sorted(Path(state.run_dir, "tb", "train").glob("events.out.tfevents.*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.tag.startswith("progress/"):
                    name = value.tag.removeprefix("progress/")
                    found.setdefault(event.step, {})[name] = float(tf.make_ndarray(value.tensor))
    return found


def rates(state: ctl_core.State) -> dict[int, float]:
    found = scalars(state).items()
    return {step: values["learning_rate"] for step, values in found if "learning_rate" in values}


def report_loss(step: int, loss: Any) -> None:
    ctl_core.report(step, loss=loss)


@pytest.fixture
def each(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the steps are, scalars for each line of metrics."""
    monkeypatch.setattr(pace, "PAUSE", 0.0)


@pytest.mark.usefixtures("each")
def test_the_rate_of_the_schedule_and_the_speed(train: Train) -> None:
    """Half a cosine; metrics.jsonl, which is compared line by line, knows none of it."""
    settings = {"lr_schedule": "cosine", "learning_rate": 0.2, "batch_size": BATCH}
    hooks = make_hooks(every_steps={2: report_loss}, create_opt=lambda lr: keras.optimizers.SGD(lr))
    first = train(hooks, steps=8, ckpt_every=8, **settings)
    assert [*rates(first)] == [2, 4, 6, 8]
    state = train(hooks, steps=16, **settings)
    found = rates(state)
    assert [*found] == [2, 4, 6, 8, 10, 12, 14, 16]
    for step in range(10, 17, 2):  # the rate that the step was taken with
        assert found[step] == pytest.approx(0.1 * (1 + np.cos(np.pi * (step - 1) / 16)), rel=1e-4)
    for values in scalars(state).values():
        expected = BATCH * values["steps_per_second"]
        assert values["examples_per_second"] == pytest.approx(expected, rel=1e-4)
    lines = map(json.loads, Path(state.run_dir, "metrics.jsonl").read_text().splitlines())
    assert {name for line in lines for name in line} == {"step", "split", "loss"}


@pytest.mark.usefixtures("each")
def test_a_rate_that_hooks_assign_and_rates_of_several_objectives(train: Train) -> None:
    state = train(
        make_hooks(
            every_steps={1: report_loss},
            after_eval=lambda lr: lr.assign(lr / 2),
            create_eval_dataset=lambda: sliced(regression_data())(50),
        ),
        steps=6,
        eval_every=2,
        learning_rate=0.25,
    )
    assert [*scalars(state)] == [1, 2, 3, 4, 5, 6], "also where it evaluates"
    found = rates(state)
    assert [found[step] for step in (1, 2, 3, 4, 5)] == [0.25, 0.25, 0.125, 0.125, 0.0625]

    def grad_pre(loss: Any, train_model: Any) -> Any:
        hidden, out = train_model.layers
        return {
            "a": (loss, 0.0, hidden.trainable_variables),
            "b": (loss, 0.0, out.trainable_variables),
        }

    state = train(
        make_hooks(
            every_steps={1: lambda step, loss: ctl_core.report(step, loss=loss["a"])},
            create_opt=lambda lr: {
                "a": keras.optimizers.SGD(lr * 0.5),
                "b": keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)),
            },
            grad_pre=grad_pre,
            update_pre=lambda gradients: (gradients, gradients),
        ),
        steps=3,
        learning_rate=0.5,
        run_name="several",
    )
    last = scalars(state)[3]
    assert last["learning_rate/a"] == 0.25 and last["learning_rate/b"] == 0.125


class Odd(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that only graphs can use."""

    def __call__(self, step: Any) -> Any:
        if tf.executing_eagerly():
            raise ValueError("of no use here")
        return 0.25

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("virtual_devices", [1, 2])
def test_rates_of_optimizers_of_all_kinds(train: Train, virtual_devices: int) -> None:
    decay = keras.optimizers.schedules.PolynomialDecay(0.5, 8, end_learning_rate=0.0)
    kinds = {
        "own": (lambda: keras.optimizers.SGD(0.25), {3: 0.25}),
        "schedule": (lambda: keras.optimizers.SGD(decay), {3: 0.3125}),  # of the next step
        "odd": (lambda: keras.optimizers.SGD(Odd()), {}),
    }
    for name, (create, expected) in kinds.items():
        hooks = make_hooks(create_opt=create, every_steps={3: report_loss})
        state = train(hooks, steps=3, run_name=name, virtual_devices=virtual_devices)
        assert rates(state) == expected, name
    assert "the learning rate cannot be read: ValueError: of no use" in (
        Path(state.run_dir, "train.log").read_text()
    )
