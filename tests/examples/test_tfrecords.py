"""Tests of the tfrecords example: splits, logged images, resuming, and make_records.py."""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.example import EXAMPLES, Example, assert_lives
from tests.helpers.project import Cli

SMALL = ("--batch-size", "16", "--hparams.width", "4")
SPLITS = ("train", "validation", "test")
IMAGE = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


@pytest.fixture
def example(cli: Cli, tmp_path: Path) -> Example:
    return Example("tfrecords", cli, tmp_path, *SMALL)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Returns a function that runs make_records.py in tmp_path and returns the output folder."""

    def function(source: str, output: str = "records") -> Path:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["make_records.py", source, output])
        runpy.run_path(str(EXAMPLES / "make_records.py"), run_name="__main__")
        return tmp_path / output

    return function


def read(folder: Path, split: str, features: dict[str, Any]) -> list[dict[str, Any]]:
    """Reads the examples of a split's four files, whose sizes differ by at most one."""
    files = [tf.data.TFRecordDataset(str(folder / f"{split}-{n}.tfrecord")) for n in range(4)]
    files_of_examples = [[tf.io.parse_single_example(r, features) for r in file] for file in files]
    assert max(map(len, files_of_examples)) - min(map(len, files_of_examples)) <= 1
    examples_of_file = [each for examples in files_of_examples for each in examples]
    return [{name: value.numpy() for name, value in each.items()} for each in examples_of_file]


def write_photos(folder: Path, count: int) -> dict[bytes, int]:
    """Writes images of three classes, and returns the label of each file's bytes."""
    labels = {}
    for number in range(count):
        content = tf.io.encode_png(np.full([4, 5, 3], number, np.uint8)).numpy()
        path = folder / ("cat", "dog", "eel")[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        labels[content] = number % 3
    return labels


def pictures(run: Path) -> dict[tuple[str, int], np.ndarray]:
    """Returns the images that a run logged in training, by tag and step."""
    pixels = {}
    for file in (run / "tb" / "train").iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "images":
                    content = tf.make_ndarray(value.tensor)[2]
                    pixels[value.tag, event.step] = tf.io.decode_png(content).numpy()
    return pixels


@pytest.mark.slow
def test_splits_and_pictures(example: Example) -> None:
    """Each digit is in exactly one split, and the logged images show the predictions."""
    outcome = example.train("a", "--learning-rate", "0.01", "--steps", "30", "--eval-every", "15")
    records = Path("records/digits")
    assert outcome.out.count("records/digits: ") == 1  # three hooks read the records
    assert [path.name for path in Path("records").iterdir()] == ["digits"]
    examples = {split: read(records, split, IMAGE) for split in SPLITS}
    digits = np.load("data/digits.npz")
    expected = sorted(
        (image.tobytes(), label)
        for image, label in zip(digits["images"], digits["labels"], strict=True)
    )
    assert expected == sorted(
        ((tf.io.decode_png(each["image"]).numpy() // 15).tobytes(), each["label"])
        for examples_of_split in examples.values()
        for each in examples_of_split
    )
    assert all(120 < len(examples[split]) < 240 for split in SPLITS[1:])

    shown = pictures(Path("runs/a"))
    assert shown["batch", 1].shape == (80, 320, 1)  # two rows of eight tiles of 10 × 10, enlarged
    assert {step for tag, step in shown if tag.startswith("confusion")} == {15, 30}
    assert any(tag.startswith("misclassified") for tag, _ in shown)


@pytest.mark.slow
def test_example_is_trained_killed_resumed_and_served(example: Example) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype("uint8")
    assert_lives(example, images, dataset="test")


def test_images_by_class(make: Callable[..., Path], tmp_path: Path) -> None:
    """Each image stays in its split when images are added, and a damaged image is reported."""
    labels = write_photos(tmp_path / "photos", 60)
    folder = make("photos")
    examples = {split: read(folder, split, IMAGE) for split in SPLITS}
    assert labels == {
        e["image"]: e["label"] for examples_of_split in examples.values() for e in examples_of_split
    }
    assert sum(map(len, examples.values())) == 60 > len(examples["train"]) > 40
    order = [each["label"] for each in examples["train"]]
    assert order != sorted(order)

    write_photos(tmp_path / "photos", 90)
    more = make("photos", "more")
    for split in SPLITS:
        contents = {each["image"] for each in read(more, split, IMAGE)}
        assert {each["image"] for each in examples[split]} == contents & labels.keys()
    with pytest.raises(SystemExit, match=r"^records exists: delete it"):
        make("photos")
    (tmp_path / "photos/dog/1.png").write_bytes(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"^photos/dog/1\.png is not an image, or is damaged: "):
        make("photos", "damaged")
    assert sorted(os.listdir()) == ["more", "photos", "records"]


def test_records_of_a_table(make: Callable[..., Path], tmp_path: Path) -> None:
    """A column is read as integers, floats or strings; identical rows are in the same split."""
    numbers = range(-10, 70)
    rows = [f"{n},{n / 4},{n * 1000 if n else ''},name {n % 7}" for n in numbers]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["label,width,price,name", *rows, *rows]) + "\n")
    features = {
        "label": tf.io.FixedLenFeature([], tf.int64),
        "width": tf.io.FixedLenFeature([], tf.float32),
        "price": tf.io.FixedLenFeature([], tf.string),  # strings, as one price is missing
        "name": tf.io.FixedLenFeature([], tf.string),
    }
    folder = make("table.csv")
    examples = {split: read(folder, split, features) for split in SPLITS}
    read_rows = {s: [tuple(e[name] for name in features) for e in examples[s]] for s in SPLITS}
    expected = {(n, n / 4, b"%d" % (n * 1000) if n else b"", b"name %d" % (n % 7)) for n in numbers}
    assert {row for rows_of_split in read_rows.values() for row in rows_of_split} == expected
    assert sum(map(len, read_rows.values())) == 2 * len(expected)
    assert not set(read_rows["train"]) & {*read_rows["validation"], *read_rows["test"]}
    table.write_text("a,b\n1,2\n3\n")
    with pytest.raises(ValueError, match="shorter"):
        make("table.csv", "ragged")
