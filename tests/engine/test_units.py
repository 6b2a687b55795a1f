"""Elements read many at once: the same as one by one, also from the middle of a unit."""

from __future__ import annotations

import numpy as np
import pytest

from ctl_core import units
from tests.helpers.fixtures import Train
from tests.helpers.resume import values
from tests.helpers.stretched import words_hooks


@pytest.mark.slow
def test_a_run_is_cut_in_the_middle_of_a_unit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Units of ten steps: at a resume, units are used in part, as a whole, and not begun."""
    element, tally = 8 * 5 * 4 + 8 * 4, 1 + 4 * 8  # bytes; elements carry what a pass leaves out
    monkeypatch.setattr(units, "UNIT_BYTES", 10 * (element + tally))
    settings = {"batch_size": 8, "jit_compile": True}
    whole = train(words_hooks(), steps=23, run_name="whole", **settings)
    assert whole.data.unit == 10
    for stop in (4, 10, 11, 23):
        cut = train(words_hooks(), steps=stop, run_name="cut", **settings)
    for path, value in values(whole).items():
        np.testing.assert_array_equal(value, values(cut)[path], err_msg=path)
    assert "reading and dropping" not in "".join(capfd.readouterr())
    plain = train(words_hooks(), steps=24, run_name="cut", batch_size=8, jit_compile=False)
    assert "since it was saved with stretches that are compiled" in "".join(capfd.readouterr())
    whole = train(words_hooks(), steps=24, run_name="whole", **settings)
    for ours, other in zip(plain.train_model.weights, whole.train_model.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), other.numpy(), 1e-4, 1e-5)
