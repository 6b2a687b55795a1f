"""The example gan: on one and two devices, killed and resumed, its pictures and its distance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.example import Example, assert_lives
from tests.helpers.project import Cli

SMALL = ("--hparams.width", "2", "--batch-size", "8", "--eval-batch-size", "64", "--log-every", "3")


@pytest.mark.slow
def test_lives(cli: Cli, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=(5, 32)).astype("float32")
    example = Example("gan", cli, tmp_path, *SMALL)
    hooks = tmp_path / "callbacks.py"
    hooks.write_text(hooks.read_text().replace("every_steps = {100:", "every_steps = {3:"))
    assert_lives(example, {"noise": noise})
    lines = [
        [json.loads(line) for line in (tmp_path / f"runs/{run}/metrics.jsonl").open()]
        for run in ("whole", "two-devices")
    ]
    one, two = (next(line for line in several if line["split"] == "train") for several in lines)
    assert one.keys() == two.keys() == {"step", "split", "distance", "penalty"}
    assert one["penalty"] > 0.0
    for name in ("distance", "penalty"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert_frechet(tmp_path / "runs" / "whole")
    assert_drawn(tmp_path / "runs")


def assert_frechet(run: Path) -> None:
    """The metric is what NumPy makes of the held-out digits and the images that are predicted."""
    with np.load(run.parents[1] / "data" / "digits.npz") as file:
        real = file["images"][file["test"]] / 16.0
    with np.load(run / "predictions.npz") as file:
        made = file["output"]
    assert made.shape == (359, 8, 8, 1) and 0.0 <= made.min() < made.max() <= 1.0
    one, other = (images.reshape(359, 64).astype("float64") for images in (real, made))
    a, b = np.cov(one.T, bias=True), np.cov(other.T, bias=True)
    shared = np.sqrt(np.linalg.eigvals(a @ b).astype(complex)).real.sum()
    expected = ((one.mean(0) - other.mean(0)) ** 2).sum() + np.trace(a + b) - 2.0 * shared
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    (found,) = (line["frechet"] for line in lines if line["step"] == 6 and "frechet" in line)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def assert_drawn(runs: Path) -> None:
    """The sheet has the images of its hundred noises; a resumed run draws the same bytes."""
    sheets = [(runs / name / "samples" / "000006.png").read_bytes() for name in ("whole", "parts")]
    assert sheets[0] == sheets[1]
    sheet = tf.io.decode_png(sheets[0]).numpy()
    noise = tf.random.stateless_normal([100, 32], seed=[0, 0])
    images = np.asarray(ctl_core.load(runs / "whole")({"noise": noise}))[..., 0]
    for number in (0, 37, 99):
        row, column = 30 * (number // 10) + 4, 30 * (number % 10) + 4
        found = sheet[row : row + 24 : 3, column : column + 24 : 3, 0]
        np.testing.assert_allclose(found / 255.0, images[number], atol=1.01 / 255.0)
