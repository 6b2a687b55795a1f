"""The data file of the digits example is what its script makes, and is what it says it is."""

from __future__ import annotations

import runpy
from pathlib import Path
from zipfile import ZipFile

import numpy as np
from sklearn.datasets import load_digits

from tests.helpers.rendering import ROOT, TEMPLATE

DATA = TEMPLATE / "data" / "digits.npz"


def members(path: Path) -> dict[str, bytes]:
    """The archive's contents: how they are compressed depends on the version of zlib."""
    with ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_committed_file_is_what_the_script_makes(tmp_path: Path) -> None:
    made = tmp_path / "digits.npz"
    runpy.run_path(str(ROOT / "scripts" / "make_digits.py"))["make"](made)
    assert members(made) == members(DATA)


def test_contents() -> None:
    data = np.load(DATA)
    assert list(data) == ["images", "labels", "train", "test"]
    source = load_digits()
    assert data["images"].dtype == np.uint8 and data["images"].shape == (1797, 8, 8)
    np.testing.assert_array_equal(data["images"], source.images)
    assert data["labels"].dtype == np.uint8
    np.testing.assert_array_equal(data["labels"], source.target)
    # Every example is in one part, and a fifth of each digit is held out.
    both = np.concatenate([data["train"], data["test"]])
    np.testing.assert_array_equal(np.sort(both), np.arange(1797))
    for digit in range(10):
        held_out = np.mean(np.isin(np.flatnonzero(data["labels"] == digit), data["test"]))
        assert abs(held_out - 0.2) < 0.005
    assert DATA.stat().st_size < 64 * 1024
