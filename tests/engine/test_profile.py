"""The profile of some steps, and the summary of where the time went."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tensorflow as tf

from ctl_core.profile import Clock
from tests.helpers.cases import make_hooks, regression_data
from tests.helpers.fixtures import Train


@pytest.mark.parametrize(("steps", "words"), [(8, "profile of steps 3 to 5"), (4, "3 to 5")])
def test_a_profile_is_written_also_if_training_ends_first(
    train: Train, steps: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = train(make_hooks(), steps=steps, profile="3:5")
    assert list(state.run_dir.glob("tb/train/plugins/profile/*/*.xplane.pb"))
    assert words in capsys.readouterr().out


def test_a_profile_changes_no_bit_and_ends_with_a_failing_hook(train: Train) -> None:
    plain = train(make_hooks(), steps=8, run_name="plain").train_model.get_weights()

    def fail(step: int) -> None:
        raise ValueError("mine")

    with pytest.raises(Exception, match="mine"):
        train(make_hooks(at_step={4: fail}), steps=8, profile="2:6", run_name="failing")
    profiled = train(make_hooks(), steps=8, profile="2:6", run_name="profiled")
    for one, other in zip(plain, profiled.train_model.get_weights(), strict=True):
        assert (one == other).all()


def test_the_summary_shares_out_the_time(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train(make_hooks(every_steps={2: lambda loss: None}), steps=8, ckpt_every=4)
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("time: "))
    shares = dict(re.findall(r"(\w+) (\d+)%", line))
    assert list(shares) == ["input", "steps", "hooks", "evaluation", "checkpoints", "other"]
    assert 95 <= sum(map(int, shares.values())) <= 105
    assert int(shares["steps"]) > 0 and int(shares["checkpoints"]) > 0
    clock = Clock()
    with pytest.raises(ValueError), clock.time("hooks"):
        raise ValueError
    assert clock.seconds["hooks"] > 0 and clock.seconds["steps"] == 0


def test_steps_that_wait_for_their_input_show_it(train: Train) -> None:
    def slow(*example: Any) -> Any:
        with tf.control_dependencies([tf.py_function(_pause, [], [])]):
            return tuple(tf.identity(part) for part in example)

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(regression_data())
        return dataset.batch(per_replica_batch_size, drop_remainder=True).map(slow)

    hooks = make_hooks(create_dataset=create_dataset, every_steps={5: lambda loss: None})
    state = train(hooks, steps=10)
    waited = state.clock.waited
    assert waited is not None and 0.2 < waited < 2 * state.clock.seconds["steps"]
    unwatched = train(make_hooks(create_dataset=create_dataset), steps=3, run_name="unwatched")
    assert unwatched.clock.waited is None


def _pause() -> None:
    import time

    time.sleep(0.1)
