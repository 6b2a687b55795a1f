"""Files in which a pipeline caches its elements: ``dataset.cache(FILE)`` and ``dataset.snapshot``.

TensorFlow writes such a file in the first pass. A process that is killed meanwhile leaves parts and
a lock, with which the pipeline can be neither started nor resumed. The files are the user's: here,
they are found and named, and nothing is deleted.
"""

from __future__ import annotations

import gc
import os
import platform
import zlib

import tensorflow as tf

from ctl_core.cluster.sync import Cluster
from ctl_core.compat import is_snapshot, list_stages, read_cache_file
from ctl_core.hooks.hooks import Hook


def list_cache_files(dataset: tf.data.Dataset) -> list[str]:
    """Returns the files that the stages of a pipeline cache elements in."""
    return [file for file in map(read_cache_file, list_stages(dataset)) if file]


def list_unfinished_caches(dataset: tf.data.Dataset) -> list[str]:
    """Returns the cache files of a pipeline that are not complete yet."""
    files = list_cache_files(dataset)
    return [file for file in files if not tf.io.gfile.exists(f"{file}.index")]


def has_snapshot(dataset: tf.data.Dataset) -> bool:
    """Returns whether a stage of a pipeline is a snapshot, whose position cannot be restored."""
    return any(map(is_snapshot, list_stages(dataset)))


def refuse_unfinished_caches(hook: Hook, dataset: tf.data.Dataset) -> None:
    """Refuses a pipeline with a cache file that another process has not finished.

    Raises:
        SetupError: there are such files; the message names them.
    """
    for file in list_unfinished_caches(dataset):
        if tf.io.gfile.glob(f"{file}_*"):
            gc.collect()  # an iterator of this process that nobody uses removes its own files
        leftovers = sorted(tf.io.gfile.glob(f"{file}_*"))
        if leftovers:
            to_delete = " ".join(leftovers)
            if len(leftovers) > 4:
                to_delete = f"{file}_*"
            raise hook.reject(
                f"its cache file {file} is unfinished: another process is writing it, or was "
                f"stopped. If none is running, delete {to_delete} and start again."
            )


def refuse_shared_caches(hook: Hook, dataset: tf.data.Dataset, cluster: Cluster) -> None:
    """Refuses a cache file that several processes of a cluster would write at once.

    Every process has to call this.

    Raises:
        SetupError: two processes on one machine use the same file, and it is not complete.
    """
    files = list_unfinished_caches(dataset)
    checksum = 0  # of a process without such a file
    if files:
        place = f"{platform.node()}:{sorted(map(os.path.abspath, files))}"
        checksum = zlib.crc32(place.encode()) + 1
    checksums = [int(value) for value in cluster.gather([checksum]).ravel() if value]
    if len(set(checksums)) < len(checksums):
        file = files[0] if files else ""  # this process may have none
        raise hook.reject(
            f"several processes would write the cache file {file} at once; use one file per "
            f"process, such as f'cache-{os.getpid()}', or cache in memory."
        )
