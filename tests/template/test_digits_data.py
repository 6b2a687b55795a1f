"""The data file of the digits example is what its script makes, and is what it says it is."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from tests.helpers.rendering import ROOT, TEMPLATE

DATA = TEMPLATE / "data" / "digits.npz"


def test_the_file_is_what_the_script_makes_and_says(tmp_path: Path) -> None:
    made = tmp_path / "digits.npz"
    runpy.run_path(str(ROOT / "scripts" / "make_digits.py"))["make"](made)
    data, again, source = np.load(DATA), np.load(made), load_digits()
    assert list(data) == list(again) == ["images", "labels", "train", "test"]
    for name in data:
        assert data[name].dtype == again[name].dtype
        np.testing.assert_array_equal(data[name], again[name])
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
