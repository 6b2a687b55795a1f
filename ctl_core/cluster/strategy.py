"""Which tf.distribute strategy a run uses, on which devices, and with which other processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from ctl_core.compat import cpu_devices_of_worker
from ctl_core.errors import PeerLost, SetupError, one_line, op_message
from ctl_core.settings import Config

# After which a process says that it is waiting for the others to start (seconds).
PATIENCE = 10.0


@dataclasses.dataclass(frozen=True)
class Task:
    """This process's place in the cluster; alone, it is the chief of one.

    Attributes:
        processes: how many train together
        index: this one's number, from 0; number 0 is the chief
        addresses: of all processes, as host:port
    """

    processes: int = 1
    index: int = 0
    addresses: tuple[str, ...] = ()

    @property
    def chief(self) -> bool:
        """Whether this process prints, writes summaries and keeps the checkpoints."""
        return self.index == 0


def read_task(config: Config, environ: Mapping[str, str] = os.environ) -> Task:
    """Reads this process's place in a cluster from ``TF_CONFIG``.

    The form is TensorFlow's: ``{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task":
    {"type": "worker", "index": 0}}``; with a "chief" in the cluster, that is process 0.

    Raises:
        SetupError: it cannot be read, has tasks that do not train, or the settings do not fit it.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if config.strategy not in ("auto", "multi_worker"):
        return Task()
    if not text:
        if config.strategy == "multi_worker":
            raise SetupError(
                "strategy: multi_worker needs TF_CONFIG in the environment of each process; on one "
                "machine, --workers K starts them."
            )
        return Task()
    addresses, place = _read_cluster(text)
    if len(addresses) > 1 and config.run_name is None:
        raise SetupError("run_name: a cluster needs one, the same for each of its processes.")
    return Task(len(addresses), place, addresses)


def task_of(config: Config) -> Task:
    """Returns this process's place in the cluster of a training.

    Raises:
        SetupError: ``read_task`` refuses; the settings do not say how long to train; or they ask
            for several workers, of which this is none.
    """
    if not isinstance(config, Config):
        raise SetupError(
            f"config: expected a ctl_core.Config, such as ctl_core.Config(steps=300), got a "
            f"{type(config).__name__}."
        )
    if config.workers > 1 and not os.environ.get("TF_CONFIG"):
        raise SetupError(f"workers: needs the command line: ./train.sh --workers {config.workers}")
    if config.steps is None and config.epochs is None:
        raise SetupError("steps: say how long to train, with steps or epochs.")
    return read_task(config)


def _read_cluster(text: str) -> tuple[tuple[str, ...], int]:
    """Returns the addresses of the processes that train, chief first, and which is this one's.

    Raises:
        SetupError: ``TF_CONFIG`` is none, or is of a cluster that this engine cannot be.
    """
    try:
        content = json.loads(text)
        jobs = {job: tuple(hosts) for job, hosts in content["cluster"].items()}
        type_, index = content["task"]["type"], int(str(content["task"]["index"]))
        lists = all(isinstance(hosts, list) for hosts in content["cluster"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        lists = False
    if not lists or not all(isinstance(host, str) for hosts in jobs.values() for host in hosts):
        raise SetupError(
            'TF_CONFIG: expected {"cluster": {"worker": ["host:port", ...]}, "task": {"type": '
            '"worker", "index": 0}}, or no TF_CONFIG to train in one process, got '
            f"{one_line(text, 200)}"
        )
    # Every process trains; an evaluator is none of them and may be named beside them.
    known = "expected 'worker', and at most one 'chief', which was called 'master' once"
    for job in jobs:
        if jobs[job] and job not in ("chief", "worker", "evaluator"):
            raise SetupError(
                f"TF_CONFIG: the cluster has the job {job!r}, {known}; every process trains here."
            )
    if type_ not in ("chief", "worker"):
        raise SetupError(
            f"TF_CONFIG: this process has the type {type_!r}, {known}; every process trains here, "
            "and evaluates as eval_every says."
        )
    chiefs, workers = jobs.get("chief", ()), jobs.get("worker", ())
    if len(chiefs) > 1:
        raise SetupError(
            f"TF_CONFIG: the cluster has {len(chiefs)} addresses of a chief, {', '.join(chiefs)}; "
            "expected one; the others are workers."
        )
    own = jobs.get(type_, ())
    if not 0 <= index < len(own):
        raise SetupError(
            f"TF_CONFIG: this process is {type_} {index}, but the cluster has {len(own)} of that "
            f"type, counted from 0: {', '.join(own) or 'none'}; correct the index or the list."
        )
    addresses = chiefs + workers
    for address in addresses if len(addresses) > 1 else ():
        if addresses.count(address) > 1:
            raise SetupError(
                f"TF_CONFIG: {address!r} is the address of {addresses.count(address)} processes; "
                "each needs one of its own."
            )
        if not re.search(r":\d+$", address):
            raise SetupError(f"TF_CONFIG: expected addresses as host:port, got {address!r}.")
    return addresses, index if type_ == "chief" else len(chiefs) + index


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
    _limit_gpu_memory(config.gpu_memory_limit)
    if task.processes > 1:
        _join_cluster(config, task)
    return task


def create_strategy(config: Config) -> tf.distribute.Strategy:
    """Creates the strategy that the settings ask for.

    ``auto`` joins the cluster of ``TF_CONFIG``; without one, it takes all GPUs, or the virtual
    devices, or the one device there is.

    Raises:
        SetupError: the devices asked for are not there, or the batch cannot be shared out evenly.
    """
    task = prepare(config)
    if task.processes > 1:
        strategy = _join_cluster(config, task)
        _check_batch_size(config, strategy.num_replicas_in_sync)
        return strategy
    devices = _devices(config)
    _check_batch_size(config, len(devices))
    if len(devices) == 1 and config.strategy != "mirrored":
        return tf.distribute.OneDeviceStrategy(devices[0])
    # On CPU devices, adding up on one of them is several times faster than TensorFlow's own
    # choice (collectives over loopback), and two strategies in one process do not collide.
    on_cpu = all("CPU" in device for device in devices)
    reduction = tf.distribute.ReductionToOneDevice() if on_cpu else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


def _check_batch_size(config: Config, replicas: int) -> None:
    shares = replicas * config.accumulate_steps
    if config.batch_size % shares:
        micro = f" with accumulate_steps {config.accumulate_steps}"
        raise SetupError(
            f"batch_size: {config.batch_size} cannot be shared out evenly over {replicas} "
            f"replica{'s' * (replicas > 1)}{micro * (config.accumulate_steps > 1)}; take a "
            f"multiple of {shares}."
        )
    if config.eval_batch_size is not None and config.eval_batch_size % replicas:
        raise SetupError(
            f"eval_batch_size: {config.eval_batch_size} cannot be shared out evenly over "
            f"{replicas} replicas; take a multiple of {replicas}."
        )


# A process joins its cluster once; a second strategy for it would wait for peers that are not
# starting. One for each number of devices, so that tests can use several.
_joined: dict[tuple[str, int], tf.distribute.Strategy] = {}


def joined() -> bool:
    """Whether this process is in a cluster, where TensorFlow's own end waits for the others."""
    return bool(_joined)


def _join_cluster(config: Config, task: Task) -> tf.distribute.Strategy:
    key = (os.environ["TF_CONFIG"], config.virtual_devices)
    if key not in _joined:
        try:
            with cpu_devices_of_worker(config.virtual_devices), _waiting(task), _interruptible():
                _joined[key] = tf.distribute.MultiWorkerMirroredStrategy()
        except RuntimeError as error:
            raise SetupError(
                "TF_CONFIG: TensorFlow has started before the cluster was joined; restart the "
                "Python process, or train before other TensorFlow calls."
            ) from error
        except tf.errors.OpError as error:
            own = task.addresses[task.index]
            why = op_message(error, 200)
            if "start gRPC server" in why:
                why = "its port is taken, perhaps by a process of an earlier start"
            raise PeerLost(f"{own}: this process cannot join its cluster: {why}.") from error
    return _joined[key]


# Prints the text it is given after some seconds, unless its input ends before.
_SAY_LATER = """
import sys, threading
timer = threading.Timer(float(sys.argv[1]), lambda: print(sys.argv[2], flush=True))
timer.daemon = True
timer.start()
sys.stdin.read()
"""


@contextlib.contextmanager
def _waiting(task: Task) -> Iterator[None]:
    """Says so, once, where the other processes keep this one waiting.

    It takes a small process to say it: TensorFlow lets no Python run here while it waits.
    """
    others = [a for index, a in enumerate(task.addresses) if index != task.index]
    text = f"waiting for the other processes of the cluster: {', '.join(others)}"
    command = [sys.executable, "-ISc", _SAY_LATER, str(PATIENCE), text]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError:  # no process to be had: the wait is a silent one
        yield
        return
    with process:  # closes its input and waits for it
        yield


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end a process that waits inside TensorFlow, where no Python handler runs."""
    ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _devices(config: Config) -> list[str]:
    """Names the devices, such as ``["GPU:0", "GPU:1"]``, one per replica."""
    if config.virtual_devices > 1:
        return [f"CPU:{index}" for index in range(config.virtual_devices)]
    gpus = [f"GPU:{index}" for index in range(len(tf.config.list_logical_devices("GPU")))]
    if config.strategy == "one_device":
        gpus = gpus[:1]
    return gpus or ["CPU:0"]


def count_gpus() -> int:
    """Counts the GPUs that TensorFlow sees, without starting it."""
    return len(tf.config.list_physical_devices("GPU"))


def _limit_gpu_memory(limit: int | None) -> None:
    """Lets TensorFlow take memory of the GPUs as it needs it, or ``limit`` MB of each at once.

    By itself it takes nearly all, of which other processes then have none.
    """
    gpus = tf.config.list_physical_devices("GPU")
    try:
        for gpu in gpus:
            if limit is None:
                tf.config.experimental.set_memory_growth(gpu, True)
            else:
                only = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
                tf.config.set_logical_device_configuration(gpu, [only])
    except RuntimeError:  # TensorFlow has started, in a notebook say: its devices are fixed
        there = [tf.config.get_logical_device_configuration(gpu) for gpu in gpus]
        if limit is not None and any(not one or one[0].memory_limit != limit for one in there):
            raise SetupError(
                f"gpu_memory_limit: {limit} MB asked for, but TensorFlow has already started; "
                "restart the Python process, or train before other TensorFlow calls."
            ) from None


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
                f"virtual_devices: {count} asked for, but TensorFlow has already started with "
                f"{there}; restart the Python process, or train before other TensorFlow calls."
            ) from None


def distribute(strategy: tf.distribute.Strategy, values: list[Any]) -> Any:
    """Hands the i-th value to the i-th replica of this process."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group % len(values)]
    )


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Counts the replicas of this process; every process of a cluster has as many."""
    return len(strategy.extended.worker_devices)
