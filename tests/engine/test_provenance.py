"""What a run says of where it was trained, and of what it measured."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import make_hooks, regression_data, sliced
from tests.helpers.fixtures import Train


def test_history_is_what_metrics_jsonl_has(train: Train) -> None:
    hooks = make_hooks(
        create_eval_dataset=sliced(regression_data()),
        every_steps={2: lambda step, loss: ctl_core.report(step, loss=loss)},
    )
    train(hooks, steps=3, eval_every=2)
    state = train(hooks, steps=6, eval_every=2)
    found = [(line["step"], line["split"]) for line in state.history]
    assert found == [(2, "train"), (2, "eval"), (3, "eval"), (4, "train"), (4, "eval"),
                     (6, "train"), (6, "eval")]  # fmt: skip
    assert state.history[-1]["loss"] == state.metrics["loss"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_evaluation_may_take_more_at_once_than_a_step(train: Train, replicas: int) -> None:
    sizes: list[int] = []

    def create_eval_dataset(per_replica_batch_size: int) -> Any:
        sizes.append(per_replica_batch_size)
        data = tf.data.Dataset.from_tensor_slices(regression_data())
        return data.batch(per_replica_batch_size)

    hooks = make_hooks(create_eval_dataset=create_eval_dataset)
    settings = {"steps": 2, "accumulate_steps": 2, "virtual_devices": replicas}
    plain = train(hooks, run_name="plain", **settings)
    state = train(hooks, eval_batch_size=64, **settings)
    assert sizes == [8 // replicas, 64 // replicas]
    assert state.metrics == pytest.approx(plain.metrics, rel=1e-6)
