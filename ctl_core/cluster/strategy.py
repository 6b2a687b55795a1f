"""Chooses the tf.distribute strategy and the devices of a run, and joins its cluster."""

import contextlib
import functools
import os
import time
from collections.abc import Sequence

import tensorflow as tf

from ctl_core.cluster.signals import keep_handlers
from ctl_core.cluster.task import (
    JOIN_SECONDS,
    Task,
    count_cores,
    describe_exposure,
    describe_loss,
    read_task,
    wait_for_others,
)
from ctl_core.compat import cut_join, list_cpu_devices, read_preemption
from ctl_core.run.errors import PeerLost, SetupError
from ctl_core.run.settings import Config

# The maximum time after which TensorFlow reports a signal that its own handler has received
# (seconds).
_REPORT_SECONDS = 1.5
# The time at which this process has joined the cluster, until ``has_missed_sigterm`` is called.
_joined_at: list[float] = []


def find_task(config: Config) -> Task:
    """Returns this process's place in the cluster that trains.

    Raises:
        SetupError: this process does not train, ``workers`` is set but training was not started
            from the command line, or the settings do not say how long to train.
    """
    task = read_task(config)
    if task.kind != "worker":
        raise SetupError(f"TF_CONFIG: a process of the type {task.kind} does not train.")
    if config.workers > 1 and task.processes == 1:
        raise SetupError(
            f"workers: works only on the command line: ./train.sh --workers {config.workers}"
        )
    if config.steps is None and config.epochs is None:
        raise SetupError("steps: set how long to train, with steps or epochs.")
    return task


def prepare(config: Config) -> Task:
    """Starts TensorFlow on the devices that the settings choose, and joins the cluster.

    Call this before anything else starts TensorFlow, such as a tensor in callbacks.py. Once
    TensorFlow has started, devices and cluster cannot be changed.

    Returns:
        This process's place in the cluster.

    Raises:
        SetupError: the workers of this machine cannot share its GPUs.
        PeerLost: the cluster cannot be joined.
    """
    task = read_task(config)
    if config.intra_op_threads is not None:
        _fix_threads(config.intra_op_threads)
    # In a notebook, TensorFlow may already have started, and its GPUs may be divided. The devices
    # then stay as they are. If there are fewer virtual devices than replicas, replicas share
    # devices.
    with contextlib.suppress(RuntimeError, ValueError):
        _choose_gpus(task, config.virtual_devices)
        if config.virtual_devices > 1:
            _split_cpu(config.virtual_devices)
    if task.processes > 1:
        _join_cluster(task, config.virtual_devices)
    return task


def _fix_threads(threads: int) -> None:
    """Fixes the number of threads of an op, because a kernel's order of summation depends on it.

    Raises:
        SetupError: TensorFlow has already started with another number.
    """
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:
        # TensorFlow returns 0 if an op uses all cores.
        started_with = tf.config.threading.get_intra_op_parallelism_threads() or count_cores()
        if started_with != threads:
            raise SetupError(
                f"intra_op_threads: TensorFlow was started with {started_with} threads, but this "
                f"run needs {threads} to compute the same bits; restart Python, and train before "
                "anything else uses TensorFlow."
            ) from None


def _choose_gpus(task: Task, virtual_devices: int) -> None:
    """Makes only this process's GPUs visible; TensorFlow allocates their memory as needed."""
    gpus = tf.config.list_physical_devices("GPU")
    if virtual_devices > 1:
        gpus = []
    elif task.shares_gpus:
        gpus = _take_share(gpus, task)
    if virtual_devices > 1 or task.shares_gpus:
        # The other GPUs are hidden even if no op uses them, because some Keras layers choose their
        # op based on the visible devices.
        tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)


def _split_cpu(virtual_devices: int) -> None:
    """Splits the CPU into virtual devices, which share its cores."""
    is_default = tf.config.threading.get_intra_op_parallelism_threads() == 0
    if is_default:
        # If an op of one device used all cores, the other devices would have to wait.
        cores = os.cpu_count() or 1
        tf.config.threading.set_intra_op_parallelism_threads(max(1, cores // virtual_devices))
    (cpu,) = tf.config.list_physical_devices("CPU")
    configurations = [tf.config.LogicalDeviceConfiguration()] * virtual_devices
    tf.config.set_logical_device_configuration(cpu, configurations)


def _take_share(gpus: list[tf.config.PhysicalDevice], task: Task) -> list[tf.config.PhysicalDevice]:
    """Returns the GPUs of this worker, if all workers are on one machine and share its GPUs."""
    share, remainder = divmod(len(gpus), task.processes)
    if remainder:
        raise SetupError(
            f"workers: {task.processes} workers cannot share {len(gpus)} GPUs evenly; use "
            "another number, or choose GPUs with CUDA_VISIBLE_DEVICES (empty: train on the "
            "CPU)."
        )
    first = task.index * share
    return gpus[first : first + share]


def create_strategy(config: Config) -> tf.distribute.Strategy:
    """Starts TensorFlow as ``prepare`` does, and creates the strategy that the settings choose.

    If ``TF_CONFIG`` names a cluster, ``auto`` joins it. Otherwise, ``auto`` uses the virtual
    devices if there are several, then all GPUs if there are any, and finally the CPU.
    """
    task = prepare(config)
    if task.processes > 1:
        return _join_cluster(task, config.virtual_devices)
    devices = _list_devices(config)
    if len(devices) == 1 and config.strategy != "mirrored":
        return tf.distribute.OneDeviceStrategy(devices[0])
    # On CPU devices, summing on one device is several times faster than TensorFlow's default
    # (collectives over loopback), and two strategies in one process do not interfere. With
    # ``detect_anomaly``, the op that finds a NaN fails. This would cancel collectives, and their
    # error could hide the error of the op.
    cross_device_ops = None
    if config.detect_anomaly or "CPU:0" in devices:
        cross_device_ops = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=cross_device_ops)


def _list_devices(config: Config) -> list[str]:
    """Returns the devices that this process trains on, such as ``GPU:0``."""
    devices = [f"CPU:{index}" for index in range(config.virtual_devices)]
    if config.virtual_devices == 1:
        gpus = tf.config.list_logical_devices("GPU")
        if gpus:
            devices = [f"GPU:{index}" for index in range(len(gpus))]
    if config.strategy == "one_device":
        return devices[:1]
    return devices


def read_peak_memory(devices: Sequence[str]) -> int | None:
    """Returns the highest peak memory of a GPU among some devices, in bytes; None without a GPU.

    Args:
        devices: names of devices of this process
    """
    names = [device.partition("device:")[2] for device in devices]
    peaks = [
        int(tf.config.experimental.get_memory_info(name)["peak"])
        for name in names
        if name.startswith("GPU")
    ]
    return max(peaks, default=None)


def has_joined() -> bool:
    """Returns True if this process has joined a cluster.

    When TensorFlow shuts down in such a process, it waits for the other processes.
    """
    return _join_cluster.cache_info().currsize > 0


def has_missed_sigterm() -> bool:
    """Returns True if a process of the cluster has received SIGTERM while it joined.

    At that time, TensorFlow's handler replaces the engine's. Only the first call looks for such a
    signal, and waits until TensorFlow would have reported it.
    """
    if not _joined_at:
        return False
    waited = time.monotonic() - _joined_at.pop()
    return read_preemption(max(_REPORT_SECONDS - waited, 0.1))


@functools.cache  # a second call would wait for the other processes, which do not join again
def _join_cluster(task: Task, virtual_devices: int) -> tf.distribute.Strategy:
    """Joins the cluster as the given task; returns the strategy of the cluster."""
    if task.chief:
        print(describe_exposure(task), flush=True)
    wait_for_others(task)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(task.addresses)}),
        task_type="worker",
        task_id=task.index,
        rpc_layer="grpc",
        # Without this number, the strategy would train on the CPU.
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
    )
    try:
        with keep_handlers(), list_cpu_devices(virtual_devices), cut_join(JOIN_SECONDS):
            strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except tf.errors.OpError as error:
        raise PeerLost(describe_loss(task, error)) from error
    _joined_at.append(time.monotonic())
    return strategy
