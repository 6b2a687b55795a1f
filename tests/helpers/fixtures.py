"""The fixtures of tests that train: four virtual CPU devices, and ``train`` with small settings.

The devices are fixed before TensorFlow starts, so that one process can test 1, 2 and 4 replicas.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

import ctl_core
from tests.helpers import lean

lean.hide()
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)
tf.config.list_logical_devices()  # starts TensorFlow, which fixes the devices
gc.freeze()  # the million objects that TensorFlow is made of are not looked through again and again

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
