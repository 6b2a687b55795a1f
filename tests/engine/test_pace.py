"""How a run goes, in progress.jsonl: learning rates, speed and the time of all starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core import pace, run_process
from tests.helpers.cases import make_hooks, regression_data, sliced
from tests.helpers.fixtures import Train

BATCH = 16


def lines(state: ctl_core.State, name: str = "progress.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(state.run_dir, name).open()]


def rates(state: ctl_core.State) -> dict[int, float]:
    return {x["step"]: x["learning_rate"] for x in lines(state) if "learning_rate" in x}


def report_loss(step: int, loss: Any) -> None:
    ctl_core.report(step, loss=loss)


@pytest.fixture
def each(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the steps are, a line of progress for each line of metrics."""
    monkeypatch.setattr(pace, "SHORTEST", 0.0)
    monkeypatch.setattr(pace, "SHARE", 0.0)


@pytest.mark.usefixtures("each")
def test_the_rate_of_the_schedule_and_the_time_of_all_starts(train: Train) -> None:
    """Half a cosine; metrics.jsonl, which is compared line by line, knows none of it."""
    settings = {"lr_schedule": "cosine", "learning_rate": 0.2, "batch_size": BATCH}
    hooks = make_hooks(every_steps={2: report_loss}, create_opt=lambda lr: keras.optimizers.SGD(lr))
    first = train(hooks, steps=8, ckpt_every=8, **settings)
    assert [*rates(first)] == [2, 4, 6, 8]
    spent = lines(first)[-1]["seconds"]
    state = train(hooks, steps=16, **settings)
    found = rates(state)
    assert [*found] == [2, 4, 6, 8, 10, 12, 14, 16]
    for step in range(10, 17, 2):  # the rate that the step was taken with
        assert found[step] == pytest.approx(0.1 * (1 + np.cos(np.pi * (step - 1) / 16)), rel=1e-4)
    seconds = [line["seconds"] for line in lines(state)]
    assert seconds == sorted(seconds) and seconds[-1] >= spent > 0
    assert [line["step"] for line in lines(state)] == [*range(2, 17, 2)], "one for a step"
    process = run_process.read_process(Path(state.run_dir))
    assert process is not None and process.seconds is not None and process.seconds >= seconds[-1]
    for line in lines(state):
        if "steps_per_second" in line:
            expected = BATCH * line["steps_per_second"]
            assert line["examples_per_second"] == pytest.approx(expected, rel=1e-4)
    assert {name for line in lines(state, "metrics.jsonl") for name in line} == {
        "step",
        "split",
        "loss",
    }
    shown = set()
    for file in Path(state.run_dir, "tb", "train").glob("events.out.tfevents.*"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            shown |= {(event.step, value.tag) for value in event.summary.value}
    assert {step for step, tag in shown if tag == "progress/learning_rate"} == {*found}


@pytest.mark.usefixtures("each")
def test_what_was_written_after_the_last_checkpoint_is_taken_out_but_its_time_counts(
    train: Train,
) -> None:
    def fail(step: int) -> None:
        raise ValueError("enough")

    with pytest.raises(ctl_core.RunError):
        train(make_hooks(every_steps={1: report_loss}, at_step={7: fail}), ckpt_every=4)
    state = train(make_hooks(every_steps={1: report_loss}), steps=4)
    assert [line["step"] for line in lines(state)] == [1, 2, 3, 4]
    path = Path(state.run_dir, "progress.jsonl")
    later = [*lines(state), {"step": 9, "seconds": 1000.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in later) + '{"step": 10, "sec')
    state = train(make_hooks(every_steps={1: report_loss}), steps=6)
    assert [line["step"] for line in lines(state)] == [1, 2, 3, 4, 5, 6]
    assert lines(state)[-1]["seconds"] >= 1000


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
    assert [line["step"] for line in lines(state)] == [1, 2, 3, 4, 5, 6], "also where it evaluates"
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
    (last,) = [x for x in lines(state) if x["step"] == 3 and "learning_rate/a" in x]
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
        hooks = make_hooks(create_opt=create)
        state = train(hooks, steps=3, run_name=name, virtual_devices=virtual_devices)
        assert rates(state) == expected, name
    assert "the learning rate cannot be read: ValueError: of no use" in (
        Path(state.run_dir, "train.log").read_text()
    )


def test_lines_are_few_and_a_run_without_metrics_has_its_last_one(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "SHORTEST", 1000.0)
    state = train(make_hooks(every_steps={1: report_loss}), steps=12)
    assert [line["step"] for line in lines(state)] == [1, 12]
    state = train(make_hooks(), steps=3, run_name="plain")
    (line,) = lines(state)
    assert line["step"] == 3 and line["learning_rate"] == 0.01
    state = train(make_hooks(), steps=3, run_name="plain")
    assert lines(state) == [line], "nothing was left to train"
