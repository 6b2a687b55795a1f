"""Replicas that have drifted apart are found at a checkpoint; batch normalisation does not."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.errors import RunError
from tests.helpers.cases import make_hooks, norm_model, regression_data
from tests.helpers.fixtures import Train


def test_an_update_by_one_replicas_batch_is_found_and_named(train: Train, tmp_path: Any) -> None:
    def by_own_batch(gradients: Any, batch: Any) -> Any:
        scale = tf.reduce_mean(tf.abs(batch[0]))
        return [gradients[0] * scale, *gradients[1:]], gradients

    hooks = make_hooks(update_pre=by_own_batch)
    train(hooks, steps=4, ckpt_every=2)  # on one replica, that is as good as any
    with pytest.raises(RunError, match=r"after step 6, sequential\S*/hidden/kernel .*replica 1"):
        train(hooks, steps=9, ckpt_every=2, virtual_devices=2)
    records = sorted(path.name for path in tmp_path.glob("runs/run/ckpt/engine/*.json"))
    assert records == ["ckpt-2.json", "ckpt-4.json"]


def test_a_slot_of_the_optimizer_that_differs_is_found(train: Train) -> None:
    def nudge(optimizer: Any) -> None:
        slot = next(v for v in optimizer.variables if v.path.endswith("velocity")).value
        slot.values[1].assign_add(tf.fill(slot.shape, 1e-7))

    optimizer = keras.optimizers.Nadam
    hooks = make_hooks(create_opt=lambda lr: optimizer(lr), every_steps={3: nudge})
    with pytest.raises(RunError, match=r"kernel_velocity is no longer the same"):
        train(hooks, steps=3, virtual_devices=2)


@pytest.mark.parametrize("replicas", [2, 3])
def test_moving_statistics_are_the_mean_over_the_replicas(train: Train, replicas: int) -> None:
    steps, batch = 5, 12
    hooks = make_hooks(create_model=norm_model)
    state = train(
        hooks, steps=steps, batch_size=batch, virtual_devices=replicas, learning_rate=1e-30
    )
    layer = state.train_model.layers[1]
    for statistic in (layer.moving_mean, layer.moving_variance):
        copies = [copy.numpy() for copy in statistic.value.values]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
    # By hand: the weights stand still, so that each replica's statistics follow from its batches.
    inputs = regression_data()[0]
    dense = norm_model().layers[0]
    mean, variance = np.zeros(8), np.ones(8)
    for step in range(steps):
        shares = inputs[step * batch : (step + 1) * batch].reshape(replicas, -1, inputs.shape[1])
        outputs = np.stack([dense(share).numpy() for share in shares])
        mean = mean * 0.99 + outputs.mean(1).mean(0) * 0.01
        variance = variance * 0.99 + outputs.var(1).mean(0) * 0.01
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-5)


def test_a_generator_of_the_model_draws_differently_on_each_replica(train: Train) -> None:
    from tests.helpers.cases import generator_hooks

    seen: list[np.ndarray] = []
    train(generator_hooks(seen), steps=2, virtual_devices=2, run_name="whole")
    parts: list[np.ndarray] = []
    for steps in (1, 2):
        train(generator_hooks(parts), steps=steps, virtual_devices=2, run_name="parts")
    np.testing.assert_array_equal(np.stack(seen), np.stack(parts))
    first, second = np.split(seen[0], 2)
    assert (first != second).all() and (seen[0] != seen[1]).all()
