"""What the engine's tests share: four virtual CPU devices, and hooks made of plain functions.

The devices are fixed before TensorFlow starts, so that one process can test 1, 2 and 4 replicas.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)
tf.config.list_logical_devices()  # starts TensorFlow, which fixes the devices

EXAMPLES, FEATURES = 100, 5


def regression_data() -> tuple[np.ndarray, np.ndarray]:
    """Returns 100 examples of 5 features and a target each; batches of 16 leave a remainder."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    target = (inputs @ random.normal(size=(FEATURES, 1)) + 0.5).astype("float32")
    return inputs, target


def set_weights(model: keras.Model, seed: int = 1) -> keras.Model:
    """Gives a model weights that depend on nothing but their shapes."""
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(scale=0.3, size=w.shape) for w in model.get_weights()])
    return model


def small_model() -> keras.Model:
    """A dense model of two layers."""
    return set_weights(
        keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(8, activation="tanh", name="hidden"),
                keras.layers.Dense(1, name="out"),
            ]
        )
    )


def squared_error(loss_input: Any) -> tf.Tensor:
    """One number per example."""
    output, target = loss_input
    return tf.reduce_sum((output - target) ** 2, axis=1)


def sliced(data: Any) -> Callable[[int], tf.data.Dataset]:
    """Returns a create_dataset that reads arrays in their order."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(data).batch(
            per_replica_batch_size, drop_remainder=True
        )

    return create_dataset


def make_hooks(**hooks: Any) -> SimpleNamespace:
    """Returns hooks that train ``small_model``, quietly; what is named replaces them."""
    base: dict[str, Any] = {
        "create_dataset": sliced(regression_data()),
        "create_model": small_model,
        "create_loss": lambda: squared_error,
        "every_steps": {},
    }
    return SimpleNamespace(**{**base, **hooks})


Train = Callable[..., ctl_core.State]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Returns ``train(hooks, **settings)``, with small settings and a run folder of the test's."""

    def run(hooks: Any, **settings: Any) -> ctl_core.State:
        settings = {
            "steps": 20,
            "batch_size": 16,
            "learning_rate": 0.01,
            "run_name": "run",
            "runs_dir": str(tmp_path / "runs"),
            **settings,
        }
        return ctl_core.train(hooks, ctl_core.Config(**settings))

    return run
