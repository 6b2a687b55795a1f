"""Small images to TFRecord files and back: ``tfrecords`` and ``read_tfrecords`` beside bare loops.

The bare loop writes what it reads off the disk, unchecked; the engine looks whether each image is
whole, and adds index, checksums and manifest. Both read decoded images in batches.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.report import BARE, READING, SHUFFLED, WRITING, Timing
from ctl_core.data import read_tfrecords
from ctl_core.tools.record_options import parse
from ctl_core.tools.tfrecords import write_records

FILES, BATCH, SHUFFLE = 8, 64, 10_000


def records(rounds: int, images: int) -> Iterator[Timing]:
    """Times both, in turn, seconds an image."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "photos", images)
        writers = {"engine": write, BARE: write_bare}
        yield from _timed(WRITING, writers, folder, images, rounds)
        check_equal(folder, images)
        yield from _timed(READING, {"engine": read, BARE: read_bare}, folder, images, rounds)
        readers = {"engine": read_shuffled, BARE: read_bare_shuffled}
        yield from _timed(SHUFFLED, readers, folder, images, rounds)


def _timed(
    section: str,
    peers: Mapping[str, Callable[[Path], Any]],
    folder: Path,
    images: int,
    rounds: int,
) -> Iterator[Timing]:
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    for number in range(rounds + 1):  # the first one warms up
        for peer, run in peers.items():
            start = time.perf_counter()
            run(folder)
            if number:
                seconds[peer].append((time.perf_counter() - start) / images)
    for peer, found in seconds.items():
        yield Timing(section, 1, 0, peer, found)


def make_images(folder: Path, images: int) -> None:
    """Writes waves of 28x28 as PNG files, in folders of ten classes."""
    random, (down, right) = np.random.default_rng(0), np.mgrid[:28, :28]
    files = []
    for a, b, c in random.normal(size=(min(images, 2000), 3)):
        wave = 128 + 100 * np.sin(a * down / 5 + b * right / 5 + c)
        files.append(tf.io.encode_png(wave[..., None].astype("uint8")).numpy())
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
    for number in range(images):
        path = folder / str(number % 10) / f"{number}.png"
        path.write_bytes(files[number % len(files)])


def write(folder: Path) -> None:
    """As the command does."""
    shutil.rmtree(folder / "engine", ignore_errors=True)
    words = [f"{folder}/photos", "--output", f"{folder}/engine", "--shards", str(FILES)]
    write_records(parse(words))


def write_bare(folder: Path) -> None:
    """As one writes it in a script."""
    shutil.rmtree(folder / "bare", ignore_errors=True)
    (folder / "bare").mkdir()
    paths = sorted((folder / "photos").glob("*/*.png"))
    classes = {name: label for label, name in enumerate(sorted({p.parent.name for p in paths}))}
    for number in range(FILES):
        with tf.io.TFRecordWriter(str(folder / "bare" / f"{number}.tfrecord")) as writer:
            for path in paths[number::FILES]:
                image, label = path.read_bytes(), classes[path.parent.name]
                feature = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())


def batches(folder: Path, seed: int | None = None) -> tf.data.Dataset:
    """Returns what the engine reads."""
    dataset = read_tfrecords(
        folder / "engine", "train", ("image", "label"), batch_size=BATCH, seed=seed
    )
    return dataset.prefetch(tf.data.AUTOTUNE)


def bare_batches(folder: Path, shuffled: bool = False) -> tf.data.Dataset:
    """Returns what a pipeline as in TensorFlow's guides reads."""
    spec = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = tf.io.parse_single_example(record, spec)
        image = tf.io.decode_png(example["image"], 1)
        return tf.ensure_shape(image, [28, 28, 1]), example["label"]

    dataset = tf.data.TFRecordDataset(sorted(map(str, (folder / "bare").glob("*.tfrecord"))))
    if shuffled:
        dataset = dataset.shuffle(SHUFFLE, seed=1)
    decoded = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return decoded.batch(BATCH).prefetch(tf.data.AUTOTUNE)


def _read(dataset: tf.data.Dataset) -> None:
    for _ in dataset:
        pass


def read(folder: Path) -> None:
    """A pass in order."""
    _read(batches(folder))


def read_bare(folder: Path) -> None:
    """The same of the bare files."""
    _read(bare_batches(folder))


def read_shuffled(folder: Path) -> None:
    """As many batches as a pass has."""
    _read(batches(folder, seed=1).take(int(batches(folder).cardinality())))


def read_bare_shuffled(folder: Path) -> None:
    """A pass through a shuffle buffer."""
    _read(bare_batches(folder, shuffled=True))


def check_equal(folder: Path, images: int) -> None:
    """Compares what was written: as many images, with the same pixels and labels in sum.

    Raises:
        AssertionError: they differ.
    """
    sums = []
    for dataset in (batches(folder), bare_batches(folder)):
        pixels = [
            (len(label), int(tf.reduce_sum(tf.cast(image, tf.int64))), int(tf.reduce_sum(label)))
            for image, label in dataset
        ]
        sums.append(tuple(map(sum, zip(*pixels, strict=True))))
    assert sums[0] == sums[1] and sums[0][0] == images, sums
