"""A project of one file of hooks, trained by commands, and the same training as a plain loop."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.golden import small

BASE = small.CALLBACKS + "create_eval_dataset = create_dataset\n"
FLAGS = ("--steps", "4", "--batch-size", "16", "--learning-rate", "0.1")


def weights(run: str, step: int = 4) -> list[np.ndarray]:
    model = small.create_model()
    ckpt = tf.train.Checkpoint(train_model=model)
    ckpt.read(f"runs/{run}/ckpt/ckpt-{step}").expect_partial()
    return model.get_weights()  # type: ignore[no-any-return]


def by_hand(factor: float, steps: int = 4) -> list[np.ndarray]:
    """The weights of the same training as a plain loop."""
    return small.plain(steps, lambda step: 0.1 * factor).get_weights()  # type: ignore[no-any-return]
