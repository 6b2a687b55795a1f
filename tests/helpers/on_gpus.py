"""A pytest plugin (``-p tests.helpers.on_gpus``) that uses parts of a GPU as virtual devices."""

import os

import tensorflow as tf

from ctl_core import Config, build, compilation
from ctl_core.cluster.strategy import prepare


def create_strategy(config: Config) -> tf.distribute.Strategy:
    """Returns a strategy with as many parts of the GPU as the settings have virtual devices.

    Gradients are summed on one of the parts, because NCCL does not support parts of a GPU.
    """
    prepare(config)
    names = [f"GPU:{index}" for index in range(config.virtual_devices)]
    if len(names) == 1:
        return tf.distribute.OneDeviceStrategy(names[0])
    return tf.distribute.MirroredStrategy(names, tf.distribute.ReductionToOneDevice())


def pytest_configure() -> None:
    """Makes all tests train on parts of a GPU, with the same bits in each run.

    Steps are compiled only if a test requests it, as on the CPU. If ``AS_IT_IS`` is in the
    environment, TF32 and nondeterministic ops are not switched off here, because a run with logical
    replicas must do this itself.
    """
    if "AS_IT_IS" not in os.environ:
        os.environ.update(NVIDIA_TF32_OVERRIDE="0", TF_DETERMINISTIC_OPS="1")
    vars(build)["create_strategy"] = create_strategy
    compilation.is_on_gpu = lambda strategy: False
