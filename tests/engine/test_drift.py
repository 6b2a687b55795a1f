"""Replicas that have drifted apart are found at a checkpoint; batch normalisation does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.run.errors import RunError
from tests.helpers.cases import make_hooks
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
