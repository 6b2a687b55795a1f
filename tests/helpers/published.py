"""Small files in the formats of published data sets, where ``download`` looks for them."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np


def fashion_mnist(keras_home: Path, train: int = 40, test: int = 24) -> None:
    """Writes Fashion-MNIST's four files, of images whose brightest rows say what they show."""
    folder = keras_home / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, number in (("train", train), ("t10k", test)):
        labels = random.integers(0, 10, number).astype(np.uint8)
        images = random.integers(0, 100, (number, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 4 : 2 * label + 7] += 150
        for kind, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            content = gzip.compress(bytes(header) + array.tobytes(), mtime=0)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(content)


def cifar10(keras_home: Path, train: int = 40, test: int = 24) -> None:
    """Writes CIFAR-10's archive, binary version: records of a label and 3 planes of 32 × 32."""
    folder = keras_home / "datasets" / "cifar-10"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, number in (*((f"data_batch_{i}", train // 5) for i in range(1, 6)),
                             ("test_batch", test)):  # fmt: skip
            labels = random.integers(0, 10, number).astype(np.uint8)
            images = random.integers(0, 100, (number, 3, 32, 32)).astype(np.uint8)
            for image, label in zip(images, labels, strict=True):
                image[label % 3, 3 * label : 3 * label + 4] += 150
            content = np.concatenate([labels[:, None], images.reshape(number, -1)], 1).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
