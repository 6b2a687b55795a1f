"""The example ``contrastive``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.example import Example
from tests.helpers.rendering import Render


@pytest.mark.slow
def test_contrastive(render: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example("contrastive", render, tmp_path, monkeypatch, hparams={"width": 4})
    assert_views(example)
    example.assert_same_on_two_devices()
    example.assert_resumes()
    images = np.random.default_rng(0).uniform(size=(3, 8, 8, 1)).astype("float32")
    assert example.assert_is_used(images).shape == (3, 16)
    sheet = tf.io.decode_png(tf.io.read_file("runs/whole/neighbours/000012.png"))
    assert sheet.shape == (300, 300, 1)


def assert_views(example: Example) -> None:
    """The loss is that of a plain loop over all pairs of views; few labels are shown."""
    hooks, config = example.hooks(), ctl_core.load_config("config.yaml")
    hparams = {**config.hparams, "width": 4}
    data = hooks.create_dataset(per_replica_batch_size=256, config=config, hparams=hparams)
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
