"""Trains programs in one process of a cluster.

``python -m tests.golden.cluster RUNS RUN...`` trains each run in the folder RUNS, and writes its
weights and metrics to ``RUNS/RUN-TASK.npz``. The name of a run is ``whole-PROGRAM`` or
``killed-PROGRAM``. The runs share a cluster, because starting one takes longer than training.
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


def train_one(runs: Path, run: str) -> None:
    """Trains a program.

    In a run ``whole-PROGRAM``, the chief also copies its folder to ``killed-PROGRAM``, as a kill at
    that step would leave it.
    """
    kind, _, name = run.partition("-")
    program = load_program(name)

    def kill(chief: bool) -> None:
        if chief and kind == "whole":
            engine.leave_as_killed(runs / run, runs / f"killed-{name}")

    hooks = program.hooks()
    hooks.at_step = {**getattr(hooks, "at_step", {}), KILLED: kill}
    settings: dict[str, Any] = SETTINGS | {"ckpt_every": LAST_SAVED} | program.settings
    state = engine.train(hooks, runs, run_name=run, **settings)
    weights = enumerate(compare.read_numbers(program.weights(state)))
    values: dict[str, Any] = {str(number): weight for number, weight in weights} | state.metrics
    np.savez(runs / f"{run}-{TASK}.npz", **values)


if __name__ == "__main__":
    for each in sys.argv[2:]:
        train_one(Path(sys.argv[1]), each)
