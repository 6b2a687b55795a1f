"""Compares the speed of the engine with Keras ``fit`` and custom loops: ``python -m benchmarks``.

The engine and the loops that it is compared with are called peers. All peers train the same model
from the same initial weights, on the same data in the same order, with the same update. Before the
peers are timed, in turn, their weights are compared.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import first_step, own_rows, processes
from benchmarks.page import parse_printed, print_plainly, put_into
from benchmarks.report import GOALS, GPU_GOALS, Memory, Results, Timing, print_report

# The number of devices, and the sections that are measured on them. Each line runs in a new
# process, so that the leftovers of other sections do not slow it down.
SECTIONS: list[tuple[int, list[str]]] = [
    (1, ["mlp/50", "mlp/10", "mlp/1", "cnn/50", "embedding/50", "images/50"]),
    (1, ["lstm/50", "transformer/50"]),
    (1, ["evaluation", "checkpoints"]),
    (2, ["mlp/50"]),
    (2, ["cnn/50"]),
    (4, ["mlp/50"]),
    (4, ["cnn/50"]),
    (1, ["memory"]),
    *((devices, ["logical"]) for devices in (1, 2, 4)),
    (4, ["shards"]),
]
MIXED = ["mlp/50/mixed_float16", "cnn/50/mixed_float16", "transformer/50/mixed_float16"]
OWN_PROCESS = "start"
CLUSTER = "processes"
INPUT_OF_CLUSTER = "own_rows"
NAMES = sorted({section.split("/")[0] for _, names in SECTIONS for section in names})


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints the report; returns the exit code."""
    arguments = _parse(argv)
    begun = time.monotonic()
    chosen = arguments.only or [*NAMES, OWN_PROCESS, CLUSTER, INPUT_OF_CLUSTER]
    rounds = arguments.rounds
    timings: list[Timing] = []
    memory = None
    failed = False
    device = arguments.device
    of_device = SECTIONS
    if device == "gpu":
        of_device = [*(each for each in SECTIONS if each[0] == 1), (1, MIXED)]
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the first GPU
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results"
        file.touch()
        for devices, sections in of_device:
            wanted = [section for section in sections if section.split("/")[0] in chosen]
            if wanted and not _measure(device, devices, rounds, file, *wanted):
                text = f"error: on {devices} devices, {', '.join(wanted)} ended early, see above."
                print(text, file=sys.stderr)
                failed = True
        for values in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if "peer" in values:
                timings.append(Timing(**values))
            else:
                memory = Memory(**values)
    if OWN_PROCESS in chosen:
        timings += first_step.measure(max(1, rounds // 2), device)
    if CLUSTER in chosen and device == "cpu":
        timings += processes.measure(rounds)
    if INPUT_OF_CLUSTER in chosen and device == "cpu":
        timings += own_rows.measure(rounds)
    results = Results(timings, memory, GPU_GOALS if device == "gpu" else GOALS)
    notes = _notes(device, rounds, time.monotonic() - begun)
    print_report(results, Console(width=None if sys.stdout.isatty() else 160), notes)
    if arguments.into:
        put_into(arguments.into, device, parse_printed(print_plainly(results, notes)))
    return int(failed)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=[*NAMES, OWN_PROCESS, CLUSTER, INPUT_OF_CLUSTER],
        help="one workload or measurement (may be given several times)",
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="the number of times of each peer")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="a page for the report")
    return parser.parse_args(argv)


def _measure(*words: Any) -> bool:
    """Measures in a new process, whose messages go to stderr; returns True if it succeeded."""
    command = [sys.executable, "-m", "benchmarks.worker", *map(str, words)]
    return subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


def _notes(device: str, rounds: int, seconds: float) -> list[str]:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    machine = f"{os.cpu_count()} cores ({platform.machine()})"
    if device == "gpu":
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.check_output(ask, text=True).splitlines()[0]
        machine = f"{machine} and the GPU {gpu}"
    # ``print_plainly`` breaks a line after 400 characters, so each note must be shorter.
    return [
        f"Measured in {rounds} rounds, which took {seconds:.0f} s, on a machine with {machine}. "
        f"The load averages at the end were {load}. Times are medians over the rounds.",
        "Each goal is a limit for a ratio of two measured values, which are usually durations. "
        "A ratio of two durations is computed once in each round. The table shows the median and "
        "the quartiles of the ratios of all rounds.",
        "In the rows called `exact`, all runs use `--deterministic` and the same number of "
        "threads. The column `4 logical` shows runs with `--logical-replicas 4`, and the column "
        "`4 micro` shows runs with `--accumulate-steps 4`.",
        "The column `floor` shows the time of a bare loop in the graph, with the data in memory. "
        "The column `input alone` shows the time for reading batches without training. In the "
        "column `many steps`, each call takes 50 steps, or 10 if the loss is read every 10 steps. "
        "In the column `saving`, a checkpoint is written every 100 steps.",
        "In the row called `input of 2 ms`, preparing an example takes about two milliseconds, and "
        "each process has one core. With `ctl.data.own_rows`, each of the two processes in the "
        "column `engine` prepares half of the examples. In the column `whole input`, each prepares "
        "all of them.",
    ]


if __name__ == "__main__":
    sys.exit(main())
