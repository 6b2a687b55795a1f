"""Which tf.distribute strategy a run uses, on which devices, and with which other processes."""

import contextlib
import functools
import os
from typing import Any

import tensorflow as tf

from ctl_core.cluster.task import JOIN, Task, describe_loss, read_task, wait_for_others
from ctl_core.compat import cut_join, list_cpu_devices
from ctl_core.run.errors import PeerLost, SetupError
from ctl_core.run.settings import Config


def find_task(config: Config) -> Task:
    """Returns this process's place in the cluster of a training.

    Raises:
        SetupError: it has none, or the settings do not say how long to train.
    """
    task = read_task(config)
    if task.kind != "worker":
        raise SetupError(f"TF_CONFIG: a process of the type {task.kind} trains nothing.")
    if config.workers > 1 and task.processes == 1:
        raise SetupError(f"workers: needs the command line: ./train.sh --workers {config.workers}")
    if config.steps is None and config.epochs is None:
        raise SetupError("steps: say how long to train, with steps or epochs.")
    return task


def prepare(config: Config) -> Task:
    """Starts TensorFlow on the devices, and in the cluster, that the settings ask for.

    To be called before anything else does, such as a tensor in callbacks.py: devices and cluster
    are fixed from then on. Where there are too few virtual ones, replicas share one.

    Raises:
        SetupError: the workers of this machine cannot share its GPUs.
        PeerLost: the cluster cannot be joined.
    """
    task, devices = read_task(config), config.virtual_devices
    gpus = tf.config.list_physical_devices("GPU")
    with contextlib.suppress(RuntimeError, ValueError):  # in a notebook: started, GPUs divided
        if devices > 1 or task.shares_gpus:  # some Keras layers choose their op by what is there
            gpus = [] if devices > 1 else _take_share(gpus, task)
            tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:  # and not nearly all memory at once
            tf.config.experimental.set_memory_growth(gpu, True)
        if devices > 1:
            # They share the cores, too: an op of one that ran on all would hold up the others.
            if tf.config.threading.get_intra_op_parallelism_threads() == 0:  # the user has not
                cores = max(1, (os.cpu_count() or 1) // devices)
                tf.config.threading.set_intra_op_parallelism_threads(cores)
            (cpu,) = tf.config.list_physical_devices("CPU")
            each = [tf.config.LogicalDeviceConfiguration()] * devices
            tf.config.set_logical_device_configuration(cpu, each)
    if task.processes > 1:
        _join_cluster(task, devices)
    return task


def _take_share(gpus: list[tf.config.PhysicalDevice], task: Task) -> list[Any]:
    """Returns the GPUs of one of the workers that share them."""
    each, left = divmod(len(gpus), task.processes)
    if left:
        raise SetupError(
            f"workers: {task.processes} workers cannot share {len(gpus)} GPUs evenly; take another "
            "number, or choose GPUs with CUDA_VISIBLE_DEVICES (empty: train on the CPU)."
        )
    return gpus[task.index * each :][:each]


def create_strategy(config: Config) -> tf.distribute.Strategy:
    """Creates the strategy that the settings ask for, and starts TensorFlow: see ``prepare``.

    ``auto`` joins the cluster that ``TF_CONFIG`` names; without one, it takes all GPUs, or the
    virtual devices, or the one device there is.
    """
    task = prepare(config)
    if task.processes > 1:
        return _join_cluster(task, config.virtual_devices)
    devices = [f"CPU:{index}" for index in range(config.virtual_devices)]
    if config.virtual_devices == 1 and (gpus := tf.config.list_logical_devices("GPU")):
        devices = [f"GPU:{index}" for index in range(len(gpus))]
    if config.strategy == "one_device":
        devices = devices[:1]
    if len(devices) == 1 and config.strategy != "mirrored":
        return tf.distribute.OneDeviceStrategy(devices[0])
    # On CPU devices, adding up on one of them is several times faster than TensorFlow's own
    # choice (collectives over loopback), and two strategies in one process do not collide. An op
    # that fails, as one that finds a NaN, cancels collectives, whose error then may hide its own.
    on_one = config.detect_anomaly or "CPU:0" in devices
    reduction = tf.distribute.ReductionToOneDevice() if on_one else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


def has_joined() -> bool:
    """Whether this process is in a cluster, where TensorFlow's own end waits for the others."""
    return _join_cluster.cache_info().currsize > 0


@functools.cache  # once: a second strategy would wait for others that are not starting
def _join_cluster(task: Task, virtual_devices: int) -> tf.distribute.Strategy:
    wait_for_others(task)
    cluster = tf.train.ClusterSpec({"worker": list(task.addresses)})
    gpus = {"GPU": len(tf.config.get_visible_devices("GPU"))}  # or it would train on the CPU
    place: dict[str, Any] = {"task_type": "worker", "task_id": task.index, "rpc_layer": "grpc"}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, num_accelerators=gpus, **place
    )
    try:
        with list_cpu_devices(virtual_devices), cut_join(JOIN):
            return tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except tf.errors.OpError as error:
        raise PeerLost(describe_loss(task, error)) from error
