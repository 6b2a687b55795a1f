"""Elements read many at once: the same as one by one, also from the middle of a unit."""

from __future__ import annotations

import pytest

from ctl_core import units
from tests.helpers.cases import assert_weights
from tests.helpers.fixtures import Train
from tests.helpers.stretched import words_hooks


@pytest.mark.slow
def test_a_run_is_cut_in_the_middle_of_a_unit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Units of ten steps: at a resume, units are used in part, as a whole, and not begun."""
    monkeypatch.setattr(units, "UNIT_BYTES", 10 * (8 * 5 * 4 + 8 * 4))
    settings = {"batch_size": 8, "jit_compile": True}
    whole = train(words_hooks(), steps=23, run_name="whole", **settings)
    assert whole.data.unit == 10
    for stop in (4, 10, 11, 23):
        cut = train(words_hooks(), steps=stop, run_name="cut", **settings)
    assert_weights(cut, whole, rtol=0)
    assert "reading and dropping" not in "".join(capfd.readouterr())
    plain = train(words_hooks(), steps=24, run_name="cut", batch_size=8, jit_compile=False)
    assert "reading and dropping 184 examples" in "".join(capfd.readouterr())
    whole = train(words_hooks(), steps=24, run_name="whole", **settings)
    assert_weights(plain, whole, rtol=1e-4)
