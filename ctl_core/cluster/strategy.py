"""Which tf.distribute strategy a run uses, on which devices, and with which other processes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from typing import Any

import tensorflow as tf

from ctl_core.cluster.task import Task, read_task, wait_for_others
from ctl_core.compat import cpu_devices_of_worker
from ctl_core.run.errors import PeerLost, SetupError, brief
from ctl_core.run.settings import Config

# After all processes are there, TensorFlow makes them a cluster in seconds; where one of them ends
# just then, the others would wait for ever (seconds).
JOINING = 300
RESTART = "restart the Python process, or train before other TensorFlow calls."


def task_of(config: Config) -> Task:
    """Returns this process's place in the cluster of a training.

    Raises:
        SetupError: ``read_task`` refuses; this process is no worker; the settings do not say how
            long to train; or they ask for several workers, of which this is none.
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

    To be called before anything else that makes TensorFlow start, such as a tensor in
    callbacks.py: devices and cluster are fixed from then on. Calling it again changes nothing.

    Raises:
        SetupError: TensorFlow has started otherwise.
        PeerLost: the cluster cannot be joined.
    """
    task = read_task(config)
    if config.virtual_devices > 1:
        _split_cpu(config.virtual_devices)
    with contextlib.suppress(RuntimeError):  # TensorFlow has started, in a notebook say
        for gpu in tf.config.list_physical_devices("GPU"):  # and not nearly all memory at once
            tf.config.experimental.set_memory_growth(gpu, True)
    if task.processes > 1:
        _join_cluster(task, config.virtual_devices)
    return task


def create_strategy(config: Config) -> tf.distribute.Strategy:
    """Creates the strategy that the settings ask for.

    ``auto`` joins the cluster that ``TF_CONFIG`` names; without one, it takes all GPUs, or the
    virtual devices, or the one device there is.

    Raises:
        SetupError: the devices asked for are not there.
    """
    task = prepare(config)
    if task.processes > 1:
        return _join_cluster(task, config.virtual_devices)
    devices = _devices(config)
    if len(devices) == 1 and config.strategy != "mirrored":
        return tf.distribute.OneDeviceStrategy(devices[0])
    # On CPU devices, adding up on one of them is several times faster than TensorFlow's own
    # choice (collectives over loopback), and two strategies in one process do not collide. An op
    # that fails, as one that finds a NaN, cancels collectives, whose error then may hide its own.
    on_one = config.detect_anomaly or all("CPU" in device for device in devices)
    reduction = tf.distribute.ReductionToOneDevice() if on_one else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


def joined() -> bool:
    """Whether this process is in a cluster, where TensorFlow's own end waits for the others."""
    return _join_cluster.cache_info().currsize > 0


@functools.cache  # once: a second strategy would wait for others that are not starting
def _join_cluster(task: Task, virtual_devices: int) -> tf.distribute.Strategy:
    wait_for_others(task)
    cluster = tf.train.ClusterSpec({"worker": list(task.addresses)})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="worker", task_id=task.index, rpc_layer="grpc"
    )
    signal.alarm(JOINING)
    try:
        with cpu_devices_of_worker(virtual_devices):
            strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except RuntimeError as error:
        raise SetupError(
            f"cluster: TensorFlow has started before it was joined; {RESTART}"
        ) from error
    except tf.errors.OpError as error:
        raise PeerLost(f"cluster: cannot be joined: {brief(error, 200)}.") from error
    finally:
        signal.alarm(0)
    _check_devices(task)
    return strategy


def _check_devices(task: Task) -> None:
    """Refuses processes with other numbers of devices: sums over all replicas would never end."""
    for kind in ("GPU", "CPU"):
        found = [tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices(kind)]
        counts = [sum(device.task == index for device in found) for index in range(task.processes)]
        if len({*counts}) > 1:
            raise SetupError(
                f"cluster: the processes have {counts} {kind} devices; give each of them as many "
                "(CUDA_VISIBLE_DEVICES, virtual_devices)."
            )


def _devices(config: Config) -> list[str]:
    """Names the devices, such as ``["GPU:0", "GPU:1"]``, one per replica."""
    if config.virtual_devices > 1:
        return [f"CPU:{index}" for index in range(config.virtual_devices)]
    gpus = [f"GPU:{index}" for index in range(len(tf.config.list_logical_devices("GPU")))]
    if config.strategy == "one_device":
        gpus = gpus[:1]
    return gpus or ["CPU:0"]


def _split_cpu(count: int) -> None:
    """Splits the CPU into ``count`` logical devices, unless TensorFlow has that many already.

    They share the cores, too: an op of one that ran on all of them would hold up the others.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        if tf.config.threading.get_intra_op_parallelism_threads() == 0:  # not chosen by the user
            share = max(1, (os.cpu_count() or 1) // count)
            tf.config.threading.set_intra_op_parallelism_threads(share)
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError:  # TensorFlow has started, in a notebook say: its devices are fixed
        there = len(tf.config.list_logical_devices("CPU"))
        if there < count:
            raise SetupError(
                f"virtual_devices: {count} asked for, but TensorFlow has started with {there}; "
                f"{RESTART}"
            ) from None


def distribute(strategy: tf.distribute.Strategy, values: list[Any]) -> Any:
    """Hands the i-th value to the i-th replica of this process."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group % len(values)]
    )


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Counts the replicas of this process; every process of a cluster has as many."""
    return len(strategy.extended.worker_devices)
