"""Losses, updates and evaluations are those of one device, even if values are not finite."""

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.reference import Reference


def test_extra_loss_counts_once(train_small: engine.Train) -> None:
    def find_extra(model: Any) -> tf.Tensor:
        return 0.1 * tf.add_n([tf.reduce_sum(v**2) for v in model.trainable_variables])

    def grad_pre(loss: Any, train_model: Any) -> Any:
        return loss, find_extra(train_model), train_model.trainable_variables

    hooks = small.hooks(grad_pre=grad_pre)
    state = train_small(hooks, virtual_devices=3)

    plain = Reference(hooks).train(small.create_dataset(small.BATCH).take(6))
    compare.assert_close(state.train_model.weights, plain.parts.train_model.weights)


@pytest.mark.parametrize("devices", small.slow_but(3, of=[1, 3]))
def test_a_mean_of_keras_within_a_loss_is_one_on_any_devices(
    train_small: engine.Train, devices: int
) -> None:
    """The mean is the loss of one head. Keras would also divide it by the number of replicas."""
    mean = keras.losses.MeanSquaredError()
    create_loss = lambda: lambda pair: small.squared_error(pair) + mean(pair[1], pair[0])  # noqa: E731
    state = train_small(
        small.hooks(create_loss=create_loss), batch_size=15, virtual_devices=devices
    )
    batches = small.slices(small.data(), drop_remainder=True)(15)
    plain = small.plain(6, lambda _: 2 * small.RATE, batches=batches)
    compare.assert_close(state.train_model.weights, plain.weights)


def test_a_metric_may_be_averaged_as_in_the_tutorial_of_tensorflow(
    train_small: engine.Train,
) -> None:
    """A metric may be an average over the global batch, as in TensorFlow's tutorial.

    In a loss, this is refused, because the engine itself divides by the batch size.
    """

    def average(output: Any, batch: Any) -> Any:
        errors = tf.reduce_sum((output - batch[1]) ** 2, axis=1)
        return tf.nn.compute_average_loss(errors, global_batch_size=37)

    hooks = small.hooks(
        create_eval_dataset=small.create_eval_dataset,
        create_metrics=lambda: {"error": keras.metrics.Mean()},
        metric_pre=average,
        create_train_metrics=lambda: {"error": keras.metrics.Mean()},
        train_metric_pre=average,
    )
    state = train_small(hooks, steps=0, eval_batch_size=37)
    assert state.metrics["error"] == pytest.approx(state.metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("devices", small.slow_but(3, of=[1, 3]))
def test_the_default_update_drops_nan_and_clips_the_sum(
    train_small: engine.Train, devices: int
) -> None:
    """The update sets a NaN gradient to zero, and clips the others, whose norm is far above 10."""

    def grad_pre(loss: Any, train_model: Any) -> Any:
        poison = tf.reduce_sum(train_model.weights[-1]) * math.nan
        return 100.0 * loss + poison, 0.0, train_model.trainable_variables

    hooks = small.hooks(grad_pre=grad_pre)
    del hooks.update_pre
    state = train_small(hooks, steps=2, on_nan="ignore", virtual_devices=devices)
    plain = Reference(hooks).train(small.create_dataset(small.BATCH).take(2))
    compare.assert_close(state.train_model.weights, plain.parts.train_model.weights)


def poison_batch(number: int) -> Any:
    """Returns a ``create_dataset`` hook in which one target of the given batch is NaN."""
    inputs, target = small.data()
    target[number * small.BATCH - 1] = math.nan
    return small.slices((inputs, target), drop_remainder=True)


def test_on_nan_stops_or_warns_of_a_loss_that_is_not_finite(
    train_small: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """``stop`` ends the run and names the step; ``warn`` continues training."""
    hooks = small.hooks(create_dataset=poison_batch(4))
    with pytest.raises(ctl_core.RunError, match="step 4"):
        train_small(hooks, on_nan="stop", ckpt_every=2)
    hooks.create_dataset = poison_batch(5)
    warned = train_small(hooks, on_nan="warn", run_name="warned")
    assert warned.step == 6
    assert warned.diverged
    assert "step 5" in capsys.readouterr().out


# ---- An evaluation counts each example once, has no side effects, and selects checkpoints --------


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
        at_step={4: lambda lr: lr.assign(2.0)},  # from here on, the loss only increases
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
