"""Trains programs in one process of a cluster.

``python -m tests.golden.cluster RUNS RUN_NAME PROGRAM...`` trains each program as
RUNS/RUN_NAME-PROGRAM, and writes its weights and metrics to ``RUNS/RUN_NAME-PROGRAM-TASK.npz``. The
programs share a cluster, because starting one takes longer than training.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import compare, engine
from tests.golden.catalogue import KILLED, LAST_SAVED, SETTINGS, load_program

TASK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def train_one(runs: Path, run_name: str, name: str) -> None:
    """Trains a program.

    If the run is named ``whole``, the chief also copies its folder, as a kill at that step would
    leave it.
    """
    program, run = load_program(name), f"{run_name}-{name}"

    def kill(chief: bool) -> None:
        if chief and run_name == "whole":
            engine.leave_as_killed(runs / run, runs / f"killed-{name}")

    hooks = program.hooks()
    hooks.at_step = {**getattr(hooks, "at_step", {}), KILLED: kill}
    settings: dict[str, Any] = SETTINGS | {"ckpt_every": LAST_SAVED} | program.settings
    state = engine.train(hooks, runs, run_name=run, **settings)
    weights = enumerate(compare.read_numbers(program.weights(state)))
    values: dict[str, Any] = {str(number): weight for number, weight in weights} | state.metrics
    np.savez(runs / f"{run}-{TASK}.npz", **values)


if __name__ == "__main__":
    for each in sys.argv[3:]:
        train_one(Path(sys.argv[1]), sys.argv[2], each)
