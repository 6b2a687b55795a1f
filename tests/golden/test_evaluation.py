"""Evaluation counts each example once, leaves no trace, and decides what is kept."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.golden import compare, engine, small


@pytest.mark.parametrize("size", [1, 37])
def test_each_example_is_evaluated_once(train_small: engine.Train, size: int) -> None:
    inputs, target = small.data(size)
    hooks = small.hooks(
        create_eval_dataset=small.slices((inputs, target)),
        create_metrics=lambda: {"seen": keras.metrics.Sum(), "error": keras.metrics.Mean()},
        metric_pre=lambda output, batch: {
            "seen": (tf.ones_like(output),),
            "error": (tf.abs(output - batch[1]),),
        },
    )
    state = train_small(hooks, steps=0, virtual_devices=4)
    error = np.abs(small.create_model()(inputs).numpy() - target)
    expected = {"seen": size, "error": error.mean(), "loss": (error**2).mean()}
    assert state.metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("devices", "size"), [(1, 16), (3, 5)])
def test_vectors_are_one_number_for_each_example(
    train_small: engine.Train, devices: int, size: int
) -> None:
    hooks = small.hooks(
        create_eval_dataset=small.create_eval_dataset,
        create_metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        metric_pre=lambda output, batch: (batch[1][:, 0], output[:, 0]),
    )
    state = train_small(hooks, steps=0, virtual_devices=devices, eval_batch_size=size)
    expected = small.errors(small.create_model())["error"]
    assert state.metrics["error"] == pytest.approx(expected, rel=1e-5)


def test_training_does_not_notice_an_evaluation(train_small: engine.Train) -> None:
    hooks = small.hooks(create_model=lambda: small.model_with(keras.layers.Dropout(0.3, seed=2)))
    without = train_small(hooks, run_name="without").train_model.get_weights()
    hooks.create_eval_dataset = small.create_eval_dataset
    evaluated = train_small(hooks, eval_every=1, run_name="evaluated").train_model.get_weights()
    compare.assert_same(evaluated, without)


def test_the_best_is_kept_and_training_stops_early(train_small: engine.Train) -> None:
    hooks = small.hooks(
        create_eval_dataset=small.create_eval_dataset,
        at_step={4: lambda lr: lr.assign(2.0)},  # from here on it only gets worse
    )
    more = {"eval_every": 1, "keep_best": "loss", "early_stop": "loss:2"}
    state = train_small(hooks, steps=20, **more)
    assert state.step < 20
    (best,) = (state.run_dir / "ckpt" / "best").glob("ckpt-*.index")
    kept = tf.train.Checkpoint(train_model=small.create_model())
    kept.read(str(best).removesuffix(".index")).expect_partial()
    step = int(best.name.removeprefix("ckpt-").removesuffix(".index"))
    assert step in (3, 4)
    compare.assert_close(kept.train_model.weights, small.plain(step).weights)
