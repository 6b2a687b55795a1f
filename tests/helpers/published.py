"""Small files in the formats of published data sets, and examples that download these instead."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import re
import tarfile
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.helpers.example import Example

HASH = re.compile(r'"([0-9a-f]{32}|[0-9a-f]{64})"')


def fashion_mnist(web: Path, train: int = 40, test: int = 24) -> None:
    """Writes Fashion-MNIST's four files, of images whose brightest rows say what they show."""
    web.mkdir()
    random = np.random.default_rng(0)
    for part, number in (("train", train), ("t10k", test)):
        labels = random.integers(0, 10, number).astype(np.uint8)
        images = random.integers(0, 100, (number, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 4 : 2 * label + 7] += 150
        for kind, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            content = gzip.compress(bytes(header) + array.tobytes(), mtime=0)
            (web / f"{part}-{kind}-ubyte.gz").write_bytes(content)


def cifar10(web: Path, train: int = 40, test: int = 24) -> None:
    """Writes CIFAR-10's archive, binary version: records of a label and 3 planes of 32 × 32."""
    web.mkdir()
    random = np.random.default_rng(0)
    with tarfile.open(web / "cifar-10-binary.tar.gz", "w:gz") as archive:
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


def download_from(example: Example, web: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an example download the files of a folder; returns where Keras puts them.

    Of its hooks, the address and the checksums are changed, and nothing else.
    """
    home = example.folder / "keras"
    home.mkdir()
    monkeypatch.setenv("KERAS_HOME", str(home))  # for other processes; here Keras has read it
    here = functools.partial(keras.utils.get_file, cache_dir=str(home))
    monkeypatch.setattr(keras.utils, "get_file", here)
    hooks = example.folder / "callbacks.py"
    source = re.sub(r'URL = "[^"]*/', f'URL = "{web.as_uri()}/', hooks.read_text())
    for old in HASH.findall(source):
        (name,) = re.findall(rf'"([\w-]+\.gz)": "{old}"', source) or [*map(str, web.iterdir())]
        kind = hashlib.md5 if len(old) == 32 else hashlib.sha256
        source = source.replace(old, kind((web / name).read_bytes()).hexdigest())
    hooks.write_text(source)
    return home / "datasets"
