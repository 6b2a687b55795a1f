"""What ``predict`` writes, and never over what it reads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tests.helpers.cases import regression_data
from tests.helpers.project import EVALUATED, Cli

INPUTS = regression_data()[0]


def test_what_is_read_is_not_written_over(cli: Cli, tmp_path: Path) -> None:
    flags = ("--steps", "2", "--batch-size", "16", "--run-name", "a")
    assert cli(EVALUATED, command=("train", *flags)).code == 0
    np.savez("x.npz", INPUTS)
    os.link("x.npz", "hard.npz")
    os.symlink("x.npz", "soft.npz")
    before = Path("x.npz").read_bytes()
    for output in ("x.npz", "./x.npz", "hard.npz", "soft.npz"):
        outcome = cli(None, "--input", "x.npz", "--output", output, command=("predict",))
        assert outcome.code == (2 if "x.npz" in output else 0)  # a link is replaced, not followed
        assert Path("x.npz").read_bytes() == before
    assert cli(None, command=("predict",)).code == 0
    first = Path("runs/a/predictions.npz").read_bytes()
    outcome = cli(None, "--input", "x.npz", command=("predict",))
    assert outcome.code == 0 and "to runs/a/predictions-x.npz" in outcome.out
    assert Path("runs/a/predictions.npz").read_bytes() == first
