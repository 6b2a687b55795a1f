"""``--shard-optimizer`` divides the state of optimizers among devices, and changes no weight."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.test_logical_replicas import assert_equal, make_hooks

SETTINGS = {"batch_size": 16, "ckpt_every": 0, "eval_every": 2, "seed": 7, "logical_replicas": 6}


def train(runs: Path, name: str, hooks: Any, **settings: Any) -> ctl_core.State:
    return engine.train(hooks, runs, **{**SETTINGS, "run_name": name, **settings})


def test_the_bits_are_those_of_a_run_without_shards(tmp_path: Path) -> None:
    """Also if the run is resumed without shards, or on another number of devices."""
    hooks = make_hooks("cnn", create_opt=lambda lr: keras.optimizers.AdamW(lr, weight_decay=0.01))
    expected = train(tmp_path, "whole", hooks, steps=8, ema=0.9)
    for steps, devices, shards in ((2, 3, True), (4, 2, False), (6, 2, True), (8, 3, True)):
        settings = {"ema": 0.9, "virtual_devices": devices, "shard_optimizer": shards}
        state = train(tmp_path, "shards", hooks, steps=steps, **settings)
    assert_equal(state, expected)


def test_each_device_has_only_its_part_of_the_state(train: engine.Train) -> None:
    """Adam's moments are on one device each; the devices have about the same number of bytes."""
    state = train(
        small.hooks(create_opt=lambda lr: keras.optimizers.Adam(lr)),
        **small.settings(3, virtual_devices=3, shard_optimizer=True, ema=0.9),
    )
    devices: dict[str, int] = {}
    for variable in state.optimizer.variables:
        if variable.shape.rank > 0:
            assert not isinstance(variable.value, tf.distribute.DistributedValues)
            size = int(np.prod(variable.shape))
            devices[variable.value.device] = devices.get(variable.value.device, 0) + size
    assert sorted(devices.values()) == [2 * 8, 2 * 9, 2 * 40]


OPTIMIZERS = sorted(
    name
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type)
    and issubclass(kind, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "TFOptimizer")
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_keras(train: engine.Train, name: str) -> None:
    """Trained on three devices with shards, each gives the weights of one device, or is refused."""
    create_opt = getattr(keras.optimizers, name)
    hooks = small.hooks(create_opt=lambda lr: create_opt(lr))
    expected = train(hooks, run_name="whole", **small.settings(3))
    settings = small.settings(3, virtual_devices=3, shard_optimizer=True)
    try:
        state = train(hooks, run_name="shards", **settings)
    except ctl_core.SetupError as error:
        print(error)
        assert name in ("Adafactor",)
        return
    compare.assert_close(state.train_model.weights, expected.train_model.weights)
    compare.assert_close(state.optimizer.variables, expected.optimizer.variables)
