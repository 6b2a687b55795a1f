"""Checks that long compiled training on several devices leaks neither threads nor memory.

XLA is reported to leak threads under MirroredStrategy (TensorFlow's issue 56423).
``python -m scripts.compiled_soak --steps 5000`` prints the number of threads and the memory after a
tenth of the steps and at the end. It fails if there are more than 2 additional threads, or if the
memory has grown by more than 1 %. With ``--gpu``, the devices are parts of the first GPU. With
``--trainings 10``, one process trains ten times, and the numbers of threads after the second and
after the last training are compared.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from ctl_core import build

PART_OF_GPU_MIB = 2048
MORE_THREADS = 2
MORE_MEMORY = 0.01


class Use(NamedTuple):
    """The number of threads of this process, and its memory in bytes."""

    threads: int
    memory: int

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.memory / 2**20:.0f} MiB"


def read_use() -> Use:
    """Returns the number of threads and the memory of this process."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Use(threads, pages * resource.getpagesize())


def create_dataset(global_batch_size: int) -> tf.data.Dataset:
    """Returns examples of a linear function."""
    inputs = np.random.default_rng(0).normal(size=(1024, 16)).astype("float32")
    examples = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(axis=1, keepdims=True)))
    return examples.batch(global_batch_size, drop_remainder=True)


def create_model() -> keras.Model:
    """Returns a dense network with Dropout."""
    layers = keras.layers
    return keras.Sequential([layers.Dense(32, "relu"), layers.Dropout(0.1), layers.Dense(1)])


def create_loss() -> Any:
    """Returns the squared error of each example."""
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2, axis=1)


def train_on_parts_of_gpu(number: int) -> None:
    """Makes the run train on parts of the first GPU; gradients are summed on one of them."""
    gpu = tf.config.list_physical_devices("GPU")[0]
    part = tf.config.LogicalDeviceConfiguration(memory_limit=PART_OF_GPU_MIB)
    tf.config.set_logical_device_configuration(gpu, [part] * number)
    names = [f"GPU:{index}" for index in range(number)]
    strategy = tf.distribute.MirroredStrategy(names, tf.distribute.ReductionToOneDevice())
    vars(build)["create_strategy"] = lambda _: strategy


def main() -> int:
    """Trains; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.compiled_soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--trainings", type=int, default=1)
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    if arguments.gpu:
        train_on_parts_of_gpu(arguments.devices)
    uses: list[Use] = []

    def note(step: Any) -> None:
        uses.append(read_use())
        print(f"step {int(step)}: {uses[-1]}", flush=True)

    hooks = SimpleNamespace(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=create_loss,
        every_steps={},
        at_step={arguments.steps // 10: note, arguments.steps: note},
    )
    for _ in range(arguments.trainings):
        with tempfile.TemporaryDirectory() as folder:
            config = ctl_core.Config(
                steps=arguments.steps,
                batch_size=32,
                jit_compile=True,
                virtual_devices=1 if arguments.gpu else arguments.devices,
                runs_dir=folder,
                ckpt_every=0,
            )
            ctl_core.train(hooks, config)
        gc.collect()
    if arguments.trainings > 1:
        early, late = uses[3], uses[-1]
        # XLA keeps the executables of each model until the process ends.
        has_leaked = late.threads > early.threads + MORE_THREADS
    else:
        early, late = uses
        has_leaked = (
            late.threads > early.threads + MORE_THREADS
            or late.memory > (1.0 + MORE_MEMORY) * early.memory
        )
    print("leaks" if has_leaked else "does not leak")
    return int(has_leaked)


if __name__ == "__main__":
    sys.exit(main())
