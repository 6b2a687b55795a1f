"""tf.data's tuner, whose end may hold a process up for a minute, is there only to tune."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.helpers.cases import assert_weights, make_hooks, regression_data, sgd
from tests.helpers.fixtures import Train


def iterators(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """What the options of each dataset that is read from here on say of the tuner."""
    made: list[bool | None] = []
    of_tensorflow = tf.data.Dataset.__iter__

    def begin(self: Any) -> Any:
        made.append(self.options().autotune.enabled)
        return of_tensorflow(self)

    monkeypatch.setattr(tf.data.Dataset, "__iter__", begin)
    return made


def batches(per_replica_batch_size: int) -> tf.data.Dataset:
    examples = tf.data.Dataset.from_tensor_slices(regression_data())
    return examples.batch(per_replica_batch_size)


def evaluated(**hooks: Any) -> Any:
    """Hooks that evaluate."""
    return make_hooks(
        create_eval_dataset=batches,
        create_metrics=lambda: {"error": keras.metrics.MeanSquaredError()},
        create_opt=sgd,
        **hooks,
    )


@pytest.mark.parametrize("settings", [{"virtual_devices": 2}, {"jit_compile": True}])
def test_no_iterator_of_a_plain_pipeline_has_one(
    train: Train, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    made = iterators(monkeypatch)
    train(evaluated(), steps=4, eval_every=2, **settings)
    assert len(made) > 3 and set(made) == {False}


def test_parallel_stages_are_tuned_in_training_and_train_the_same(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parallel(per_replica_batch_size: int) -> tf.data.Dataset:
        return batches(per_replica_batch_size).map(lambda *x: x, tf.data.AUTOTUNE)

    expected = train(evaluated(), steps=4, run_name="plain").train_model.get_weights()
    made = iterators(monkeypatch)
    hooks = evaluated(create_dataset=parallel)
    hooks.create_eval_dataset = parallel
    assert_weights(train(hooks, steps=4, eval_every=2), expected, rtol=0)
    assert made.count(None) == 1 and made.count(False) > 2
