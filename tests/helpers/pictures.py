"""Folders of small images for tests, with what is in them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.data import read_tfrecords
from tests.helpers.cases import make_hooks, set_weights, sgd

CLASSES = ("cat", "dog", "eel")


def pixels(number: int, size: tuple[int, int] = (6, 5), channels: int = 1) -> np.ndarray:
    """Returns image ``number``; no two are the same."""
    values = np.arange(size[0] * size[1] * channels).reshape(*size, channels)
    return ((values * (1 + number % 7) + number * 37 + number // 100) % 256).astype("uint8")


def make_pictures(folder: Path, count: int, start: int = 0) -> dict[str, tuple[np.ndarray, int]]:
    """Writes PNG files by class; returns image and label by path below the folder."""
    made = {}
    for number in range(start, start + count):
        label = number % len(CLASSES)
        name = f"{CLASSES[label]}/{number}.png"
        made[name] = (pixels(number), label)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(pixels(number)).numpy())
    return made


def picture_model() -> keras.Model:
    """Makes one number of an image."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    return set_weights(keras.Sequential([keras.Input((6, 5, 1)), *layers]))


def prepared(image: Any, label: Any) -> tuple[Any, Any]:
    """Makes input and target of image and label."""
    return tf.cast(image, tf.float32) / 255.0, tf.cast(label, tf.float32)[..., None]


def picture_hooks(
    data: Path, batched: bool = True, shared: bool = False, **more: Any
) -> SimpleNamespace:
    """Hooks that train on TFRecord files.

    Args:
        data: their folder
        batched: whether read_tfrecords makes the batches
        shared: whether it is told which process of a cluster reads
        **more: arguments of read_tfrecords
    """

    def read(size: int, **place: Any) -> tf.data.Dataset:
        names, size_of = ("image", "label"), size if batched else None
        dataset = read_tfrecords(data, "train", names, batch_size=size_of, **more, **place)
        dataset = dataset.map(prepared)
        return dataset if batched else dataset.batch(size, drop_remainder=True)

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return read(per_replica_batch_size)

    def create_shared(per_replica_batch_size: int, input_context: Any) -> tf.data.Dataset:
        return read(per_replica_batch_size, input_context=input_context)

    return make_hooks(
        create_dataset=create_shared if shared else create_dataset,
        create_model=picture_model,
        create_opt=sgd,
    )
