"""The profile of some steps."""

from __future__ import annotations

import pytest

from tests.helpers.cases import assert_weights, make_hooks
from tests.helpers.fixtures import Train


def test_a_profile_changes_no_bit_and_ends_with_a_failing_hook(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train(make_hooks(), steps=8, run_name="plain")

    def fail(step: int) -> None:
        raise ValueError("mine")

    with pytest.raises(Exception, match="mine"):
        train(make_hooks(at_step={4: fail}), steps=8, profile="2:6", run_name="failing")
    profiled = train(make_hooks(), steps=8, profile="3:5", run_name="profiled")
    assert_weights(profiled, plain, rtol=0)
    assert list(profiled.run_dir.glob("tb/train/plugins/profile/*/*.xplane.pb"))
    assert "profile of the steps after 3 up to 5" in capsys.readouterr().out
