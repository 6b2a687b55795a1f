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
from ctl_core.evaluation import summaries
from tests.helpers.cases import make_hooks
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
    monkeypatch.setattr(summaries, "PAUSE", 0.0)


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
