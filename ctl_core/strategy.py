"""Which tf.distribute strategy a run uses, and on which devices."""

from __future__ import annotations

import tensorflow as tf

from ctl_core.config import Config
from ctl_core.errors import SetupError


def create_strategy(config: Config) -> tf.distribute.Strategy:
    """Creates the strategy that the settings ask for.

    ``auto`` takes all GPUs, or the virtual devices, or the one device there is.

    Raises:
        SetupError: the devices asked for are not there, or the batch cannot be shared out evenly.
    """
    devices = _devices(config)
    if config.batch_size % len(devices):
        raise SetupError(
            f"batch_size: {config.batch_size} cannot be shared out evenly over {len(devices)} "
            f"replicas; take a multiple of {len(devices)}."
        )
    if len(devices) == 1 and config.strategy != "mirrored":
        return tf.distribute.OneDeviceStrategy(devices[0])
    # On CPU devices, adding up on one of them is several times faster than TensorFlow's own
    # choice (collectives over loopback), and two strategies in one process do not collide.
    on_cpu = all("CPU" in device for device in devices)
    reduction = tf.distribute.ReductionToOneDevice() if on_cpu else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


def _devices(config: Config) -> list[str]:
    """Names the devices, such as ``["GPU:0", "GPU:1"]``, one per replica."""
    if config.virtual_devices > 1:
        _split_cpu(config.virtual_devices)
        return [f"CPU:{index}" for index in range(config.virtual_devices)]
    gpus = [f"GPU:{index}" for index in range(len(tf.config.list_logical_devices("GPU")))]
    if config.strategy == "one_device":
        gpus = gpus[:1]
    return gpus or ["CPU:0"]


def _split_cpu(count: int) -> None:
    """Splits the CPU into ``count`` logical devices, unless TensorFlow has that many already."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError:  # TensorFlow has started, in a notebook say: its devices are fixed
        there = len(tf.config.list_logical_devices("CPU"))
        if there < count:
            raise SetupError(
                f"virtual_devices: {count} asked for, but TensorFlow has already started with "
                f"{there}; restart the Python process, or train before other TensorFlow calls."
            ) from None
