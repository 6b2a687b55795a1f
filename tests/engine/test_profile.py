"""The profile of some steps, and the summary of where the time went."""

from __future__ import annotations

import pytest

from tests.helpers.cases import assert_weights, make_hooks
from tests.helpers.fixtures import Train


@pytest.mark.parametrize(("steps", "words"), [(8, "profile of steps 3 to 5"), (4, "3 to 5")])
def test_a_profile_is_written_also_if_training_ends_first(
    train: Train, steps: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = train(make_hooks(), steps=steps, profile="3:5")
    assert list(state.run_dir.glob("tb/train/plugins/profile/*/*.xplane.pb"))
    assert words in capsys.readouterr().out


def test_a_profile_changes_no_bit_and_ends_with_a_failing_hook(train: Train) -> None:
    plain = train(make_hooks(), steps=8, run_name="plain")

    def fail(step: int) -> None:
        raise ValueError("mine")

    with pytest.raises(Exception, match="mine"):
        train(make_hooks(at_step={4: fail}), steps=8, profile="2:6", run_name="failing")
    profiled = train(make_hooks(), steps=8, profile="2:6", run_name="profiled")
    assert_weights(profiled, plain, rtol=0)
