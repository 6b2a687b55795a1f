"""Writes the data of the example digits, ``data/digits.npz`` of the template (make generated).

The source is ``sklearn.datasets.load_digits``: 1,797 images of handwritten digits, the test part
of "Optical Recognition of Handwritten Digits" in the UCI Machine Learning Repository. The file
contains ``images`` [1797, 8, 8] and ``labels`` [1797], both uint8, in scikit-learn's order. Two
sorted index arrays of type int32, ``train`` and ``test``, divide them into training and test data.

For every digit, 80 % of the images are training data. They are chosen by NumPy's legacy generator
with a fixed seed, because NumPy promises not to change its numbers. numpy.savez writes no times, so
the file depends only on the data and the version of zlib.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "{{cookiecutter.project_slug}}" / "data" / "digits.npz"
TEST_SHARE = 0.2


def split(labels: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns the sorted indices of the training examples and of the test examples."""
    random = np.random.RandomState(0)
    held_out = [
        random.permutation(np.flatnonzero(labels == digit))[
            : round(TEST_SHARE * int(np.sum(labels == digit)))
        ]
        for digit in range(10)
    ]
    test = np.sort(np.concatenate(held_out)).astype(np.int32)
    train = np.setdiff1d(np.arange(len(labels), dtype=np.int32), test)
    return train, test


def make(path: Path) -> None:
    """Writes the data file."""
    data = load_digits()
    images = data.images.astype(np.uint8)
    if not np.array_equal(images, data.images):
        raise ValueError("load_digits: expected whole numbers from 0 to 16")
    labels = data.target.astype(np.uint8)
    train, test = split(labels)
    np.savez_compressed(path, images=images, labels=labels, train=train, test=test)


if __name__ == "__main__":
    make(FILE)
