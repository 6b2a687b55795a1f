"""Folders of small images for tests, with what is in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

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
