"""A pytest plugin (``-p tests.helpers.on_gpus``): virtual devices of tests are parts of a GPU."""

import os

import tensorflow as tf

from ctl_core import Config, build, compilation
from ctl_core.cluster.strategy import prepare


def create_strategy(config: Config) -> tf.distribute.Strategy:
    """Returns the strategy for as many parts as the settings have virtual devices.

    They add up on one of them: NCCL does not know parts.
    """
    prepare(config)
    names = [f"GPU:{index}" for index in range(config.virtual_devices)]
    if len(names) == 1:
        return tf.distribute.OneDeviceStrategy(names[0])
    return tf.distribute.MirroredStrategy(names, tf.distribute.ReductionToOneDevice())


def pytest_configure() -> None:
    """Lets all runs train so, and the same run give the same bits.

    They are compiled only if a test asks for it, as on the CPU.
    With ``AS_IT_IS`` in the environment nothing is switched off: a run with logical replicas
    has to do that by itself.
    """
    if "AS_IT_IS" not in os.environ:
        os.environ.update(NVIDIA_TF32_OVERRIDE="0", TF_DETERMINISTIC_OPS="1")
    build.create_strategy = create_strategy
    compilation.is_on_gpu = lambda strategy: False
