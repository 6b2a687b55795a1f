"""Losses and updates, counted and clipped as one device does it, and values that are not finite."""

from __future__ import annotations

import math
from typing import Any

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


@pytest.mark.parametrize("devices", [1, 3])
def test_the_default_update_drops_nan_and_clips_the_sum(
    train_small: engine.Train, devices: int
) -> None:
    """One weight's gradient is NaN; the others' norm is far above 10."""

    def grad_pre(loss: Any, train_model: Any) -> Any:
        poison = tf.reduce_sum(train_model.weights[-1]) * math.nan
        return 100.0 * loss + poison, 0.0, train_model.trainable_variables

    hooks = small.hooks(grad_pre=grad_pre)
    del hooks.update_pre
    state = train_small(hooks, steps=2, on_nan="ignore", virtual_devices=devices)
    plain = Reference(hooks).train(small.create_dataset(small.BATCH).take(2))
    compare.assert_close(state.train_model.weights, plain.parts.train_model.weights)


def poison_batch(number: int) -> Any:
    """Returns a create_dataset whose given batch has a target that is NaN."""
    inputs, target = small.data()
    target[number * small.BATCH - 1] = math.nan
    return small.slices((inputs, target), drop_remainder=True)


def test_a_loss_that_is_not_finite(
    train_small: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """``stop`` ends the run and names the step; ``warn`` goes on."""
    hooks = small.hooks(create_dataset=poison_batch(4))
    with pytest.raises(ctl_core.RunError, match="step 4"):
        train_small(hooks, on_nan="stop", ckpt_every=2)
    hooks.create_dataset = poison_batch(5)
    warned = train_small(hooks, on_nan="warn", run_name="warned")
    assert warned.step == 6 and warned.diverged
    assert "step 5" in capsys.readouterr().out
