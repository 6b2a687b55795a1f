"""Runs the tests and measurements that need a GPU, the most important ones first.

``python -m scripts.on_gpu FOLDER --seconds 600`` runs the parts below on the first GPU, each in its
own process, and writes their output to FOLDER. Parts for which no time is left are not run. For
each part, a line is printed that says how it ended, and what its output should show.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """A part of the work.

    Attributes:
        name: the name of the part, and of the file with its output
        arguments: the arguments of Python
        shows: what its output should show
    """

    name: str
    arguments: str
    shows: str


_ON_GPUS = "-m pytest -q -p no:xdist -p tests.helpers.on_gpus"
PARTS = [
    Part(
        "compiled-by-itself",
        "-m pytest -q -p no:xdist tests/engine/test_gpu.py -k executable",
        "a run on a GPU is compiled automatically, and its weights equal those of a plain loop",
    ),
    Part(
        "bench",
        "-m benchmarks --device gpu --rounds 3 --only mlp --only cnn --only transformer "
        "--only lstm",
        "fit with many steps / engine: at least 4 for mlp and transformer, 3.5 for cnn; lstm is "
        "not compiled, because of its cuDNN op, and takes as long as before",
    ),
    Part(
        "one-generator",
        f"{_ON_GPUS} tests/engine/test_compilation.py -k one_number",
        "a seed gives the same number in all hooks, on one, two and three parts of the GPU",
    ),
    Part(
        "gpu-tests",
        "-m pytest -q -p no:xdist tests/engine/test_gpu.py",
        "weights equal those of plain loops; a compiled run stays so from GPU to CPU and back",
    ),
    Part(
        "cpu-tests-on-parts",
        f"{_ON_GPUS} -m 'not slow' tests/engine/test_reduction.py tests/engine/test_step.py",
        "tests for CPU devices also pass on parts of a GPU, including compiled updates",
    ),
    Part(
        "soak",
        "-m scripts.compiled_soak --gpu --steps 5000",
        "'does not leak'; as long as this fails, auto does not compile on several GPUs",
    ),
]


def main() -> int:
    """Runs the parts; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.on_gpu", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the output is written")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all parts together")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    failed = False
    for part in PARTS:
        start = time.monotonic()
        if start >= end:
            print(f"{part.name}: no time left", flush=True)
            continue
        ending = run_part(part, arguments.folder, end - start)
        failed |= ending != "passed"
        seconds = time.monotonic() - start
        print(f"{part.name}: {ending} in {seconds:.0f} s. Look for: {part.shows}", flush=True)
    return int(failed)


def run_part(part: Part, folder: Path, seconds: float) -> str:
    """Runs a part for at most ``seconds``; returns how it ended."""
    command = f"{sys.executable} {part.arguments}"
    with (folder / f"{part.name}.txt").open("w") as output:
        try:
            done = subprocess.run(
                command, shell=True, stdout=output, stderr=subprocess.STDOUT, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return "stopped at the time limit"
    if done.returncode == 0:
        return "passed"
    return f"failed with exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
