"""Compares the facts that must be the same on all processes of a cluster before they train.

To compare another fact, add it to ``find_process_facts`` if it is known before the hooks are
called; otherwise, pass it to ``Cluster.compare`` where it is known.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from ctl_core import __version__
from ctl_core.checkpoint.logical_replicas import read_kernel_variables
from ctl_core.cluster.facts import Facts
from ctl_core.cluster.sync import Cluster
from ctl_core.hooks.callbacks_file import read_hooks_file
from ctl_core.hooks.project_modules import read_project_modules
from ctl_core.run.errors import ENGINE, quote
from ctl_core.run.settings import Config, flatten
from ctl_core.types import Callbacks, Optimizer

_ALIKE = "the processes of the cluster differ"
_CURE = "give all of them the same files, packages and devices."
# Settings that affect only the reports of a process, and not its computation.
_MAY_DIFFER = ("debug", "runs_dir")


def compare_processes(
    cluster: Cluster, strategy: tf.distribute.Strategy, config: Config, callbacks: Callbacks
) -> None:
    """Refuses to train if the processes of a cluster differ in settings, devices or programs.

    This makes no graph call, because processes with different devices would not run the same graph.

    Raises:
        SetupError: the processes differ; the message names the process and the difference.
    """
    if cluster.task.processes == 1:
        return
    cluster.compare(
        {"intra_op_threads": repr(config.intra_op_threads)},
        "the processes use different numbers of threads, so their bits would differ",
        "on machines with different numbers of cores, pass --intra-op-threads N to each process.",
    )
    settings = flatten(dataclasses.asdict(config))
    cluster.compare(
        {name: repr(value) for name, value in settings.items() if name not in _MAY_DIFFER},
        "the settings differ between the processes of the cluster",
        "give all of them the same config.yaml, CTL_ variables and flags.",
        absent="nothing",
    )
    # The settings have been compared, so either all processes make this exchange, or none does.
    if config.logical_replicas is not None:
        cluster.compare(
            {name: quote(value) for name, value in read_kernel_variables().items()},
            "the processes choose different kernels, so their bits would differ",
            "give all of them the same environment variables.",
            absent="no value",
        )
    cluster.compare(find_process_facts(strategy, callbacks), _ALIKE, _CURE)


def compare_optimizers(cluster: Cluster, optimizers: dict[str, Optimizer]) -> None:
    """Refuses to train if the processes differ in their optimizers, or in modules of the project.

    ``compare_processes`` has compared the modules before, but hooks may have imported more modules
    since then.

    Raises:
        SetupError: the processes differ; the message names the process and the difference.
    """
    if cluster.task.processes > 1:
        facts = find_optimizer_facts(optimizers) | find_module_facts()
        cluster.compare(facts, _ALIKE, _CURE)


def find_process_facts(strategy: tf.distribute.Strategy, callbacks: Callbacks) -> Facts:
    """Returns the devices, versions and files of this process."""
    facts = {
        "devices": _describe_devices(strategy),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "NumPy": np.__version__,
        "the engine": __version__,
        "the files of ctl_core": _digest(_read_engine()),
    }
    hooks_file = read_hooks_file(callbacks)
    if hooks_file is not None:
        facts["callbacks.py"] = _digest([hooks_file])
    return facts | find_module_facts()


def find_module_facts() -> Facts:
    """Returns a digest of each module of the project that this process has imported."""
    contents = read_project_modules(Path.cwd(), with_program=True)
    return {path: _digest([content]) for path, content in contents.items()}


def find_optimizer_facts(optimizers: dict[str, Optimizer]) -> Facts:
    """Returns the class of each optimizer, and the numbers in its configuration."""
    facts = {}
    for objective, optimizer in optimizers.items():
        name = "the optimizer"
        if objective:
            name += f" of {objective}"
        facts[name] = type(optimizer).__name__
        facts |= {f"{name}'s {key}": value for key, value in _read_numbers(optimizer).items()}
    return facts


def _read_numbers(optimizer: Optimizer) -> Facts:
    """Returns the numbers in an optimizer's configuration; empty if it has no configuration."""
    config = {}
    # A user's own optimizer often has no configuration, or an incomplete one.
    with contextlib.suppress(Exception):
        config = flatten(optimizer.get_config())  # type: ignore[attr-defined]
    return {name: repr(value) for name, value in config.items() if isinstance(value, int | float)}


def _describe_devices(strategy: tf.distribute.Strategy) -> str:
    """Returns the number of devices of each kind that this process uses, such as ``2 GPU``."""
    devices = strategy.extended.worker_devices
    kinds = collections.Counter(device.split("device:")[-1].split(":")[0] for device in devices)
    return " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def _read_engine() -> Iterator[bytes]:
    """Yields the names and contents of the engine's files."""
    for path in sorted(Path(ENGINE).rglob("*.py")):
        yield os.fsencode(path.relative_to(ENGINE).as_posix())
        yield path.read_bytes()


def _digest(contents: Iterator[bytes] | list[bytes]) -> str:
    """Returns the first digits of the SHA-256 of the joined contents, for use in messages."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return f"sha256:{digest.hexdigest()[:12]}"
