"""The example tfrecords: its splits and pictures, on one and two devices, and its life."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.data import read_tfrecords
from tests.helpers.example import Example, assert_devices_agree, assert_is_short, assert_lives
from tests.helpers.project import Cli, cli

__all__ = ["cli"]
SMALL = ("--batch-size", "16", "--hparams.width", "4")


@pytest.fixture
def example(cli: Cli, tmp_path: Path) -> Example:
    return Example("tfrecords", cli, tmp_path, *SMALL)


def pictures(run: Path) -> dict[tuple[str, int], np.ndarray]:
    """The pictures of a run's training by tag and step."""
    found = {}
    for file in (run / "tb" / "train").iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "images":
                    content = tf.make_ndarray(value.tensor)[2]
                    found[value.tag, event.step] = tf.io.decode_png(content).numpy()
    return found


@pytest.mark.slow
def test_weights_do_not_depend_on_devices(example: Example) -> None:
    assert_is_short("tfrecords")
    assert_devices_agree(example)


def test_splits_and_pictures(example: Example) -> None:
    """Nothing is in two splits; the matrix is that of the predictions."""
    outcome = example.train("a", "--learning-rate", "0.01", "--steps", "30", "--eval-every", "15")
    assert outcome.out.count("wrote records/digits") == 1  # three hooks read it
    manifest = json.loads(Path("records/digits/manifest.json").read_text())
    assert sum(manifest["totals"].values()) == 1797 and len(manifest["totals"]) == 3
    seen = [
        {image.tobytes() for images in batches for image in images.numpy()}
        for batches in (
            read_tfrecords("records/digits", split, "images", batch_size=500)
            for split in ("train", "validation", "test")
        )
    ]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]

    found = pictures(Path("runs/a"))
    assert found["batch", 1].shape == (80, 320, 1)  # two rows of eight tiles of 10 × 10, enlarged
    assert {step for tag, step in found if tag.startswith("confusion")} == {15, 30}
    example.command("predict", "--run-name", "a", "--dataset", "validation")
    with np.load("runs/a/predictions.npz") as file:
        taken = file["output"].argmax(axis=1)
    (labels,) = read_tfrecords("records/digits", "validation", "labels", batch_size=500)
    counts = np.zeros([10, 10])
    np.add.at(counts, (labels, taken), 1)
    assert 10 < np.trace(counts) < len(labels)
    expected = np.sqrt(counts / counts.sum(axis=1, keepdims=True)) * 255
    shown = found["confusion, labels downwards", 30][8::16, 8::16, 0]
    np.testing.assert_allclose(shown, expected, atol=1)
    assert any(tag.startswith("mistaken") for tag, _ in found)


@pytest.mark.slow
def test_killed_resumed_and_used_elsewhere(example: Example) -> None:
    images = np.random.default_rng(0).integers(0, 17, (5, 8, 8)).astype("uint8")
    assert_lives(example, images, dataset="test")
