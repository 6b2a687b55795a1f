"""The example contrastive: its loss, on one and two devices, killed and resumed."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.example import Example, assert_lives
from tests.helpers.project import Cli

SMALL = ("--hparams.width", "4", "--batch-size", "8", "--eval-batch-size", "64")


def test_the_loss_is_that_of_all_pairs_of_views(cli: Cli, tmp_path: Path) -> None:
    Example("contrastive", cli, tmp_path)
    hooks = SimpleNamespace(**runpy.run_path(str(tmp_path / "callbacks.py")))
    hparams = {"width": 4, "labels": 100, "temperature": 0.2, "contrast": 1.0}
    data = hooks.create_dataset(256, SimpleNamespace(seed=0), hparams)
    views, labels = next(iter(data))
    assert views.shape == (256, 2, 8, 8, 1) and 0.0 <= np.min(views) < np.max(views) <= 1.4
    assert np.abs(views[:, 0] - views[:, 1]).mean() > 0.05
    assert 0 < np.sum(labels >= 0) < 60  # of a hundred in 1438
    batch = views[:8], labels[:8]
    output = hooks.create_model(hparams)(batch[0])
    found = hooks.create_loss()(hooks.loss_pre(output, batch, True, hparams))
    flat = np.reshape(output["embedding"], [16, 4])
    expected = np.zeros(16)
    for one in range(16):
        nears = {two: float(flat[one] @ flat[two]) / 0.2 for two in range(16) if two != one}
        expected[one] = np.log(sum(np.exp(near) for near in nears.values())) - nears[one ^ 1]
    np.testing.assert_allclose(found, expected.reshape(8, 2).mean(1), rtol=1e-4)


@pytest.mark.slow
def test_lives(cli: Cli, tmp_path: Path) -> None:
    images = np.random.default_rng(0).uniform(size=(5, 8, 8, 1)).astype("float32")
    assert_lives(Example("contrastive", cli, tmp_path, *SMALL), images)
    whole, parts = (tmp_path / f"runs/{name}/neighbours/000006.png" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    assert tf.io.decode_png(whole.read_bytes()).shape == (300, 300, 1)
