"""Splits the CPU into three devices before TensorFlow starts, so that tests can train on them."""

import os

# Hides GPUs before TensorFlow is imported, because a training may use them during the tests.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import ctl_core

from .reference_loop import Train

DEVICES = 3

(_cpu, *_) = tf.config.list_physical_devices("CPU")
if tf.config.get_logical_device_configuration(_cpu) is None:
    _devices = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(_cpu, _devices)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Returns a function that trains hooks with the engine in the folder of the test."""

    def train_hooks(hooks: Any, **settings: Any) -> ctl_core.State:
        settings = {"run_name": "run", "eval_every": 0, "ckpt_every": 0, "seed": 7, **settings}
        return ctl_core.train(hooks, ctl_core.Config(runs_dir=str(tmp_path), **settings))

    return train_hooks
