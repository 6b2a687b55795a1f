"""Dropout on several replicas: masks of their own, from the seed, also after a resume."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.cases import FEATURES, assert_weights, make_hooks, set_weights
from tests.helpers.fixtures import Train


class Masked(keras.Model):
    """Shows the mask of its Dropout as an output beside the value."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.out = keras.layers.Dropout(0.5), keras.layers.Dense(1)
        self.out.build((None, FEATURES))
        set_weights(self.out)

    def call(self, inputs: Any, training: bool = False) -> Any:
        mask = self.drop(tf.ones_like(inputs), training=training)
        return {"value": self.out(inputs * mask), "mask": mask}


def run(train: Train, cuts: list[int], **settings: Any) -> tuple[list[np.ndarray], Any]:
    masks: dict[int, np.ndarray] = {}
    hooks = make_hooks(
        create_model=lambda: Masked(),
        loss_pre=lambda output, batch: (output["value"], batch[1]),
        every_steps={1: lambda step, output: masks.update({step: output["mask"].numpy()})},
    )
    for steps in cuts:
        state = train(hooks, steps=steps, **settings)
    return [masks[step] for step in sorted(masks)], state


def test_each_replica_draws_its_own_mask(train: Train) -> None:
    masks, _ = run(train, [6], virtual_devices=4, batch_size=32)
    for mask in masks:
        replicas = np.split(mask, 4)
        for one in range(4):
            for other in range(one):
                assert not np.array_equal(replicas[one], replicas[other])
    assert 0.35 < np.mean(np.array(masks) == 0) < 0.65
    assert len({mask.tobytes() for mask in masks}) == 6, "each step draws a new mask"


def test_masks_follow_from_the_seed(train: Train) -> None:
    first, _ = run(train, [3], virtual_devices=2, run_name="first")
    again, _ = run(train, [3], virtual_devices=2, run_name="again")
    other, _ = run(train, [3], virtual_devices=2, run_name="other", seed=1)
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_a_resumed_run_draws_the_masks_of_the_whole(train: Train) -> None:
    whole, state = run(train, [8], virtual_devices=2, run_name="whole")
    parts, resumed = run(train, [3, 5, 8], virtual_devices=2, run_name="parts")
    assert np.array_equal(whole, parts)
    assert_weights(state, resumed, rtol=0)
