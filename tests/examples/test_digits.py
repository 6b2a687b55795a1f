"""The example ``digits``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.example import Example
from tests.helpers.rendering import Render


@pytest.mark.slow
def test_digits(render: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example("digits", render, tmp_path, monkeypatch, hparams={"width": 4})
    example.assert_same_on_two_devices()
    example.assert_resumes()
    images = np.random.default_rng(0).uniform(size=(3, 8, 8, 1)).astype("float32")
    assert example.assert_is_used(images).shape == (3, 10)
