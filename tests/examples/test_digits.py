"""The example digits: on one and two devices, killed and resumed, used without our code."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers.example import Example, assert_lives
from tests.helpers.project import Cli

SMALL = ("--hparams.width", "4", "--batch-size", "16", "--limit-eval", "2")


def test_lives(cli: Cli, tmp_path: Path) -> None:
    images = np.random.default_rng(0).uniform(size=(5, 8, 8, 1)).astype("float32")
    assert_lives(Example("digits", cli, tmp_path, *SMALL), images)
