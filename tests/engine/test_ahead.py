"""tf.data's tuner, whose end may hold a process up for a minute, is there only to tune."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests.helpers.cases import assert_weights, make_hooks, regression_data, sgd
from tests.helpers.fixtures import Train


def batches(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(regression_data()).batch(per_replica_batch_size)


def parallel(per_replica_batch_size: int) -> tf.data.Dataset:
    return batches(per_replica_batch_size).map(lambda *x: x, tf.data.AUTOTUNE)


def test_only_the_training_data_are_tuned_and_only_parallel_stages(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool | None] = []
    of_tensorflow = tf.data.Dataset.__iter__

    def begin(self: Any) -> Any:
        made.append(self.options().autotune.enabled)
        return of_tensorflow(self)

    monkeypatch.setattr(tf.data.Dataset, "__iter__", begin)
    states = []
    for name, create in (("plain", batches), ("parallel", parallel)):
        hooks = make_hooks(create_dataset=create, create_eval_dataset=create, create_opt=sgd)
        states.append(train(hooks, steps=4, eval_every=2, run_name=name))
        assert made.count(None) == (create is parallel) and made.count(False) > 2
        made.clear()
    assert_weights(states[0], states[1].train_model.get_weights(), rtol=0)
