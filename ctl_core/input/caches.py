"""Finds cache files (``dataset.cache(FILE)``) and snapshots in the training data's pipeline.

TensorFlow writes a cache file during the first pass over the data. If the process is killed during
this pass, partial files and a lock file remain. As long as they exist, the pipeline can be neither
started nor resumed. The files belong to the user, so this module only reports them and never
deletes a file.
"""

from __future__ import annotations

import gc
import os
import platform
import zlib

import tensorflow as tf

from ctl_core.cluster.sync import Cluster
from ctl_core.compat import is_snapshot, list_stages, read_cache_file, read_snapshot_folder
from ctl_core.hooks.hooks import Hook
from ctl_core.run.console import warn
from ctl_core.run.errors import find_code, format_file_name
from ctl_core.run.files import find_pattern_character


def list_cache_files(dataset: tf.data.Dataset) -> list[str]:
    """Returns the files in which the stages of a pipeline cache elements."""
    return [file for file in map(read_cache_file, list_stages(dataset)) if file]


def list_unfinished_caches(dataset: tf.data.Dataset) -> list[str]:
    """Returns the cache files of a pipeline that are not complete yet."""
    files = list_cache_files(dataset)
    return [file for file in files if not tf.io.gfile.exists(f"{file}.index")]


def has_snapshot(dataset: tf.data.Dataset) -> bool:
    """Returns whether a pipeline contains a snapshot stage.

    The position of a pipeline with such a stage cannot be restored.
    """
    return any(map(is_snapshot, list_stages(dataset)))


def refuse_unfinished_caches(hook: Hook, dataset: tf.data.Dataset) -> None:
    """Rejects a pipeline if another process has left one of the cache files unfinished.

    Raises:
        SetupError: a cache file is unfinished, or TensorFlow would interpret the name of a cache
            file or snapshot as a pattern; the message names it.
    """
    folders = filter(None, map(read_snapshot_folder, list_stages(dataset)))
    for file in [*list_cache_files(dataset), *folders]:
        character = find_pattern_character(file)
        if character is not None:
            raise hook.reject(
                f"its cache file or snapshot {file} contains {character!r}, so TensorFlow takes "
                "the name for a pattern, and could read no files, or delete those of others; "
                "choose a name without * ? [ ] \\"
            )
    for file in list_unfinished_caches(dataset):
        if tf.io.gfile.glob(f"{file}_*"):
            # An unused iterator of this process removes its cache files when it is deleted.
            gc.collect()
        leftovers = sorted(tf.io.gfile.glob(f"{file}_*"))
        if leftovers:
            to_delete = " ".join(leftovers)
            if len(leftovers) > 4:
                to_delete = f"{file}_*"
            raise hook.reject(
                f"its cache file {file} is unfinished: another process is writing it, or was "
                f"stopped. If none is running, delete {to_delete} and start again."
            )


def warn_of_old_caches(hook: Hook, dataset: tf.data.Dataset) -> None:
    """Warns of complete cache files that are older than the file with the hook.

    TensorFlow reads the examples in a cache file, even if the functions that computed them have
    changed since then.
    """
    code = find_code(hook.function)
    if code is None or not os.path.isfile(code.co_filename):
        return
    edited = os.path.getmtime(code.co_filename)
    for file in list_cache_files(dataset):
        index = f"{file}.index"
        if tf.io.gfile.exists(index) and tf.io.gfile.stat(index).mtime_nsec < edited * 1e9:
            warn(
                f"{hook}: the cache file {file} is older than "
                f"{format_file_name(code.co_filename)}; if the examples in it have changed, delete "
                f"{index} and {file}.data-*."
            )


def refuse_shared_caches(hook: Hook, dataset: tf.data.Dataset, cluster: Cluster) -> None:
    """Rejects a pipeline if several processes of a cluster would write the same cache file at once.

    Every process must call this function, because the processes exchange values.

    Raises:
        SetupError: two processes on one machine use the same unfinished cache file.
    """
    files = list_unfinished_caches(dataset)
    checksum = 0  # 0 means that this process has no unfinished cache file
    if files:
        place = f"{platform.node()}:{sorted(map(os.path.abspath, files))}"
        checksum = zlib.crc32(place.encode()) + 1
    checksums = [int(value) for value in cluster.gather([checksum]).ravel() if value]
    if len(set(checksums)) < len(checksums):
        file = files[0] if files else ""  # this process itself may have no unfinished cache file
        raise hook.reject(
            f"several processes would write the cache file {file} at once; use one file per "
            f"process, such as f'cache-{os.getpid()}', or cache in memory."
        )
