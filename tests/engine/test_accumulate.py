"""An update made of micro-batches is the update of one step with the whole batch."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from tests.helpers.cases import (
    FEATURES,
    make_hooks,
)
from tests.helpers.fixtures import Train


def test_micro_batches_run_one_after_the_other(train: Train) -> None:
    """Side by side they would need the memory of the whole batch."""
    events: list[str] = []

    def noted(tensor: tf.Tensor, event: str) -> tf.Tensor:
        def note(value: np.ndarray) -> np.ndarray:
            events.append(f"{event} begins")
            time.sleep(0.03 * (event == "backward"))
            events.append(f"{event} ends")
            return value

        # Not stateful: TensorFlow keeps stateful ops in order by itself.
        return tf.ensure_shape(
            tf.numpy_function(note, [tensor], tensor.dtype, stateful=False), tensor.shape
        )

    @tf.custom_gradient
    def watched(tensor: tf.Tensor) -> Any:
        return noted(tensor, "forward"), lambda gradient: noted(gradient, "backward")

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = tf.Variable([0.5]), tf.Variable(tf.ones([FEATURES, 1]))

        def __call__(self, inputs: Any) -> Any:
            return watched(inputs * self.first) @ self.second

    train(make_hooks(create_model=Model), steps=2, accumulate_steps=4)
    one = ["forward begins", "forward ends", "backward begins", "backward ends"]
    assert events == one * 8
