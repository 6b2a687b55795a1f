"""Trains compiled on several devices for long, and looks whether threads or memory grow.

``python -m scripts.compiled_soak --steps 5000`` prints the numbers after a tenth of the steps and
at the end, and fails if there are more than 2 threads or 1 % of memory more. XLA is reported to
leak threads under MirroredStrategy (TensorFlow's issue 56423). With ``--gpu`` the devices are parts
of the first GPU.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import ctl_core
from ctl_core import build
from tests.golden import small
from tests.golden.engine import start_devices
from tests.helpers import on_gpus

MORE_THREADS = 2
MORE_MEMORY = 0.01


class Use(NamedTuple):
    """What this process uses."""

    threads: int
    memory: int

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.memory / 2**20:.0f} MiB"


def read_use() -> Use:
    """Returns the number of threads, and the bytes in memory."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Use(threads, pages * resource.getpagesize())


def main() -> int:
    """Trains; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.compiled_soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    start_devices()
    if arguments.gpu:
        build.create_strategy = on_gpus.create_strategy
    uses: list[Use] = []

    def note(step: Any) -> None:
        uses.append(read_use())
        print(f"step {int(step)}: {uses[-1]}", flush=True)

    hooks = small.hooks(at_step={arguments.steps // 10: note, arguments.steps: note})
    with tempfile.TemporaryDirectory() as folder:
        config = ctl_core.Config(
            steps=arguments.steps,
            batch_size=small.BATCH,
            jit_compile=True,
            virtual_devices=arguments.devices,
            runs_dir=folder,
            ckpt_every=0,
        )
        ctl_core.train(hooks, config)
    early, late = uses
    has_leaked = (
        late.threads > early.threads + MORE_THREADS
        or late.memory > (1.0 + MORE_MEMORY) * early.memory
    )
    print("leaks" if has_leaked else "does not leak")
    return int(has_leaked)


if __name__ == "__main__":
    sys.exit(main())
